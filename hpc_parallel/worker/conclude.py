"""The former name of `hpc_parallel.job conclude`. Jobs that were submitted with version 0.1.0 start it."""

import sys

from hpc_parallel.job import conclude

if __name__ == "__main__":
    conclude(sys.argv[1:])
