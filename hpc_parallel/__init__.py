"""hpc_parallel: one command turns a configuration into a distributed training job on Slurm."""

__version__ = "0.1.0"
