"""The kinds of fabric that connect the nodes of a cluster."""

AUTO = "auto"
INFINIBAND, ROCE, SLINGSHOT, EFA, TCP = "infiniband", "roce", "slingshot", "efa", "tcp"
RDMA = (INFINIBAND, ROCE, SLINGSHOT, EFA)  # these move data without sockets
KINDS = (AUTO, *RDMA, TCP)
