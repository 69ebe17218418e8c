"""A plain MPI program: each rank prints the sum of all ranks, by Open MPI's or MPICH's own library.

mpirun -np 4 python mpi_sum.py
"""

import ctypes
import os
import sys

if "OMPI_COMM_WORLD_SIZE" in os.environ:
    mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
    names = ("ompi_mpi_comm_world", "ompi_mpi_int", "ompi_mpi_op_sum")
    world, integer, add = (ctypes.byref(ctypes.c_byte.in_dll(mpi, name)) for name in names)
else:
    mpi = ctypes.CDLL("libmpich.so.12", mode=ctypes.RTLD_GLOBAL)
    world, integer, add = 0x44000000, 0x4C000405, 0x58000003

mpi.MPI_Init(None, None)
rank, size, total = ctypes.c_int(-1), ctypes.c_int(-1), ctypes.c_int(-1)
mpi.MPI_Comm_rank(world, ctypes.byref(rank))
mpi.MPI_Comm_size(world, ctypes.byref(size))
mpi.MPI_Allreduce(ctypes.byref(rank), ctypes.byref(total), 1, integer, add, world)
print(f"rank {rank.value} of {size.value}: sum {total.value}")
mpi.MPI_Finalize()
sys.exit(3 if "--fail" in sys.argv and rank.value == 1 else 0)
