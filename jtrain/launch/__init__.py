"""Starting every process of a run, watching them, and starting them again: `jtrain launch local | tpu | slurm | gke`.

A supervisor never touches a device: nothing here imports jax.
"""
