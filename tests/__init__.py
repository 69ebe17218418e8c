"""Tests: one thread for each process, before torch is imported.

Many ranks share few cores here, and threads of OpenMP wait for each other by spinning: with two threads
for each rank, a step of a job took seconds instead of milliseconds. A fork of a process with such threads can
hang.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
