"""hpc_parallel: one command turns a configuration into a distributed training job on Slurm."""

from hpc_parallel.shadowing import refuse_shadowed_modules

__version__ = "0.1.0"

refuse_shadowed_modules()
