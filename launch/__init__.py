"""Starting runs on several machines: Slurm, hosts over ssh, Kubernetes.

Rendering needs neither torch nor Ray. `ray_cluster` is what runs on the machines themselves.
"""
