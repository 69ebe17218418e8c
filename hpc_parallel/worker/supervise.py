"""The former name of `hpc_parallel.job rank`. Jobs that were submitted with version 0.1.0 start it."""

import sys

from hpc_parallel.job import rank as run

if __name__ == "__main__":
    run(sys.argv[1])
