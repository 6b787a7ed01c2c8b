"""Which of torch's own tests do not apply to simulated ranks, and why. All others pass, or are skipped by torch's file itself.

Of torch 2.13, whose file has 285 tests; most of them are for GPUs and skip themselves on CPU.
"""

from __future__ import annotations

NO_TORCHVISION = "needs torchvision, which torch's file asks for without a check: it fails on gloo, too"
NO_GPU = "takes the GPU of its rank without a check that there is one: it fails on gloo, too"
NO_NCCL = "makes a group of NCCL, which sim refuses by name, and which a build for CPU lacks"
REFUSED_BY_GLOO = "exchanges lists of tensors of different sizes, which gloo refuses, and sim"
TIME_LIMIT = "waits for a rank that never comes until a time limit is over; sim knows at once that it will not, and ends the run"
RENDEZVOUS = "makes its world anew by a file that torch's runner names: it fails on gloo without that"
PROCESSES = "tells ranks apart by the numbers of their processes"
LOG_OF_GLOO = "asks DDP's log for gloo's threads and transport, which simulated ranks do not have"
ODD_SIZE = "expects groups of two of four ranks: it fails on gloo with eight, too"

NOT_APPLICABLE = {
    "test_SyncBatchNorm_process_group": NO_TORCHVISION,
    "test_all_to_all": REFUSED_BY_GLOO,
    "test_all_to_all_complex": REFUSED_BY_GLOO,
    "test_all_to_all_full_group": REFUSED_BY_GLOO,
    "test_all_to_all_group": REFUSED_BY_GLOO,
    "test_all_to_all_cuda": NO_GPU,
    "test_all_to_all_cuda_complex": NO_GPU,
    "test_all_to_all_full_group_cuda": NO_GPU,
    "test_all_to_all_group_cuda": NO_GPU,
    "test_batch_isend_irecv_op_err": NO_GPU,
    "test_barrier_timeout_full_group": TIME_LIMIT,
    "test_barrier_timeout_group": TIME_LIMIT,
    "test_barrier_timeout_global": RENDEZVOUS,
    "test_batch_isend_irecv_mixed_backend_err": NO_NCCL,
    "test_ddp_logging_data_cpu": LOG_OF_GLOO,
    "test_get_rank": PROCESSES,
    "test_monitored_barrier_failure_order": TIME_LIMIT,
    "test_monitored_barrier_gloo": TIME_LIMIT,
    "test_monitored_barrier_gloo_rank_0_timeout": TIME_LIMIT,
    "test_monitored_barrier_gloo_subgroup": TIME_LIMIT,
    "test_monitored_barrier_wait_all_ranks": TIME_LIMIT,
    "test_new_subgroups_with_group_param": ODD_SIZE,
}
"""Tests that are not run, each with the reason."""

NUM_PASSED = 113
"""Tests that pass on every rank."""
NUM_SKIPPED = 150
"""Tests that torch's file skips by itself, for want of GPUs or by an issue that it names."""
