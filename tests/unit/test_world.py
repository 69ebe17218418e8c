"""The environments are real captures (see machine/world.py), shortened to what bears on the question."""

import pytest

from hpc_parallel.machine.world import World, WorldError

BATCH_SHELL = {
    "SLURM_JOB_ID": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODELIST": "n[1-2]",
    "SLURMD_NODENAME": "n1",
}
SRUN = {  # srun -N3 -n5, the last task
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "5",
    "SLURM_NNODES": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "3,1(x2)",
    "SLURM_TASKS_PER_NODE": "3,1(x2)",
    "SLURMD_NODENAME": "n3",
}
PMI2 = SRUN | {"PMI_RANK": "4", "PMI_SIZE": "5", "PMI_FD": "11", "PMI_JOBID": "1.0"}  # srun --mpi=pmi2
PMIX = SRUN | {  # srun --mpi=pmix: not captured, but the variables of the standard and of Slurm's plugin
    "PMIX_RANK": "4",
    "PMIX_NAMESPACE": "slurm.pmix.1.0",
    "PMIX_SERVER_URI41": "pmix-server.811;tcp4://10.0.0.3:40117",
    "PMIX_SECURITY_MODE": "munge,native",
    "SLURM_PMIX_MAPPING_SERV": "(vector,(0,1,3),(1,2,1))",
}
SINGLE_STEP = {  # of an outer srun that started one process a node
    "SLURM_JOB_ID": "2",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURMD_NODENAME": "n2",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "f041d9cc-eec3",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "33857",
}
LOCAL = TORCHRUN | {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}  # two simulated nodes of one machine
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "prterun-n1-812@1",
}
MPICH = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PMI_FD": "6",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
PALS = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
THIRD_OF_FOUR = (3, 4, 1, 2, 1, 2)

CASES = {
    "srun": (SRUN, "slurm", (4, 5, 0, 1, 2, 3), "slurm-1-0-0"),
    "srun requeued": (SRUN | {"SLURM_RESTART_COUNT": "2"}, "slurm", (4, 5, 0, 1, 2, 3), "slurm-1-0-2"),
    "srun with PMI": (PMI2, "slurm", (4, 5, 0, 1, 2, 3), "slurm-1-0-0"),
    "srun with PMIx": (PMIX, "slurm", (4, 5, 0, 1, 2, 3), "slurm-1-0-0"),
    "srun with both": (PMIX | PMI2, "slurm", (4, 5, 0, 1, 2, 3), "slurm-1-0-0"),
    "batch shell": (BATCH_SHELL, "alone", (0, 1, 0, 1, 0, 1), "alone"),
    "batch shell of 26.05": (BATCH_SHELL | {"SLURM_STEP_ID": "-5"}, "alone", (0, 1, 0, 1, 0, 1), "alone"),
    "nothing": ({}, "alone", (0, 1, 0, 1, 0, 1), "alone"),
    "torchrun": (TORCHRUN, "torchrun", THIRD_OF_FOUR, "torchrun-f041d9cc-eec3-1"),
    "torchrun in srun": (SINGLE_STEP | TORCHRUN, "torchrun", THIRD_OF_FOUR, "torchrun-f041d9cc-eec3-1"),
    "local": (LOCAL, "torchrun", (3, 4, 3, 4, 1, 2), "torchrun-f041d9cc-eec3-1"),
    "mpirun": (OPEN_MPI, "openmpi", THIRD_OF_FOUR, "openmpi-prterun-n1-812_1"),
    "mpirun in sbatch": (BATCH_SHELL | OPEN_MPI, "openmpi", THIRD_OF_FOUR, "openmpi-prterun-n1-812_1"),
    "mpirun over srun": (SINGLE_STEP | OPEN_MPI, "openmpi", THIRD_OF_FOUR, "openmpi-prterun-n1-812_1"),
    "mpich": (MPICH, "mpi", THIRD_OF_FOUR, "mpi"),
    "mpich in sbatch": (BATCH_SHELL | MPICH, "mpi", THIRD_OF_FOUR, "mpi"),
    "mpich over srun": (SINGLE_STEP | MPICH, "mpi", THIRD_OF_FOUR, "mpi"),
    "mvapich": (MVAPICH, "mpi", THIRD_OF_FOUR, "mpi"),
    "pals": (PALS, "mpi", THIRD_OF_FOUR, "mpi"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_innermost_launcher_places_the_process(case: str) -> None:
    environment, launcher, placed, attempt = CASES[case]
    world = World.discover(environment)
    assert world.launcher == launcher
    assert (
        world.rank,
        world.world_size,
        world.local_rank,
        world.local_world_size,
        world.node,
        world.nodes,
    ) == placed
    assert world.attempt == attempt


def test_slurm_gives_the_host_of_every_rank_on_uneven_nodes() -> None:
    world = World.discover(SRUN)
    assert world.hosts == ("n1", "n2", "n3")
    assert world.tasks == (3, 1, 1)
    assert world.host == "n3"
    assert [world.where(rank) for rank in range(5)] == ["n1", "n1", "n1", "n2", "n3"]


def test_a_cyclic_distribution_is_not_read_as_blocks() -> None:
    second = SINGLE_STEP | {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_DISTRIBUTION": "cyclic",
    }
    world = World.discover(second)
    assert (world.rank, world.host, world.node) == (1, "n2", 1)
    assert world.where(0) == "one of n1, n2"


def test_without_names_a_rank_is_on_a_numbered_node() -> None:
    world = World.discover(OPEN_MPI)
    assert [world.where(rank) for rank in range(4)] == ["node 0", "node 0", world.host, world.host]
    simulated = World.discover(LOCAL)
    assert simulated.one_machine
    assert simulated.where(0) == simulated.host


WRONG = {
    "no size": (
        SRUN,
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        {},
        "no SLURM_STEP_NUM_TASKS or SLURM_NTASKS",
    ),
    "two missing": (TORCHRUN, ("LOCAL_RANK", "GROUP_RANK"), {}, "no LOCAL_RANK, no GROUP_RANK"),
    "half a torchrun": ({"RANK": "0", "WORLD_SIZE": "2"}, (), {}, "no TORCHELASTIC_RUN_ID, no LOCAL_RANK"),
    "no local rank": (PALS, ("PMI_LOCAL_RANK",), {}, "no MPI_LOCALRANKID or PMI_LOCAL_RANK"),
    "half an mpirun": (OPEN_MPI, ("OMPI_COMM_WORLD_RANK",), {}, "no OMPI_COMM_WORLD_RANK"),
    "rank too large": (TORCHRUN, (), {"RANK": "4"}, "rank 4 of 4"),
    "local rank too large": (TORCHRUN, (), {"LOCAL_RANK": "2"}, "local rank 2 of 2"),
    "no number": (TORCHRUN, (), {"RANK": "one"}, "RANK='one'"),
    "negative": (TORCHRUN, (), {"RANK": "-1"}, "RANK='-1'"),
    "negative and alone": ({"RANK": "-1"}, (), {}, "no LOCAL_RANK"),
    "too many locally": (TORCHRUN, (), {"LOCAL_WORLD_SIZE": "8"}, "8 ranks on a node of 4 in all"),
    "tasks and size": (SRUN, (), {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "5 in all"),
    "tasks unreadable": (SRUN, (), {"SLURM_STEP_TASKS_PER_NODE": "3,x"}, "'3,x'"),
    "mpi round robin": (OPEN_MPI, (), {"OMPI_COMM_WORLD_RANK": "2"}, "--map-by slot"),
    "mpi uneven": (OPEN_MPI, (), {"OMPI_COMM_WORLD_SIZE": "5"}, "as many ranks"),
}


@pytest.mark.parametrize("case", WRONG)
def test_missing_or_impossible_variables_are_named(case: str) -> None:
    base, removed, changed, words = WRONG[case]
    environment = {name: value for name, value in base.items() if name not in removed} | changed
    with pytest.raises(WorldError) as caught:
        World.discover(environment)
    assert words in str(caught.value)


def test_an_attempt_is_safe_as_a_file_name() -> None:
    attempt = World.discover(TORCHRUN | {"TORCHELASTIC_RUN_ID": "../../a b/" + "x" * 500}).attempt
    assert "/" not in attempt
    assert " " not in attempt
    assert attempt.startswith("torchrun-")
    assert len(attempt) <= 120
