"""The public names of the last version before the exchange became one package: each can still be imported."""

import importlib

import pytest

#: Modules, and what their ``__all__`` held. Frameworks of integrations are not installed everywhere.
NAMES = {
    "gradcomp": """
        Accordion AdaComp AdaQS Assignment Auto Bayes BestRank BlockFloat CLTk Cast Codebook Compression
        Compressor Config ConfigError Controller DGC DensitySchedule DeviceError EF21 ErrorFeedback Filter
        FixedPlan GlobalTopK GraVAC GradcompError GroupArray Identity KMeans LGC LGreCo LayerSpec Linear
        LocalClip MomentumCorrection NUQSGD OneBit Plan PlanMismatchError Policy PowerSGD Quantize RandomBlock
        RandomK RedSync SIDCo ScaledSign Schedule Signum SpectralAtomo StateError TernGrad Threshold TopK
        TransportError TwoLevelSelection UnbiasedRank Warmup WireFormatError __version__
    """,
    "gradcomp.torch": """
        Adasum Average DistributedOptimizer Handle HorovodInternalError HostsUpdatedInterrupt Max Min
        PostMomentumSGD ProcessSet Product ReduceOp ShardedCompression Sum SyncBatchNorm add_process_set
        allgather allgather_async allgather_object allreduce allreduce_ allreduce_async allreduce_async_
        alltoall alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_ broadcast_object
        broadcast_optimizer_state broadcast_parameters ccl_built compress_fsdp cross_rank cross_size cuda_built
        ddl_built ddp_comm_hook global_process_set gloo_built gloo_enabled grouped_allgather
        grouped_allgather_async grouped_allreduce grouped_allreduce_ grouped_allreduce_async
        grouped_allreduce_async_ grouped_reducescatter grouped_reducescatter_async init is_homogeneous
        is_initialized join load local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built
        poll rank record_gradients reducescatter reducescatter_async remove_process_set rocm_built save shutdown
        size sparse_allreduce_async start_timeline stop_timeline synchronize
    """,
    "gradcomp.tf": """
        Adasum Average CompressionState DistributedGradientTape DistributedOptimizer HorovodInternalError
        HostsUpdatedInterrupt Max Min PartialDistributedGradientTape ProcessSet Product ReduceOp Sum
        SyncBatchNormalization add_process_set allgather allgather_object allreduce alltoall barrier broadcast
        broadcast_ broadcast_global_variables broadcast_object broadcast_object_fn broadcast_variables callbacks
        ccl_built cross_rank cross_size cuda_built ddl_built global_process_set gloo_built gloo_enabled
        grouped_allgather grouped_allreduce grouped_reducescatter init is_homogeneous is_initialized join load
        load_model local_rank local_rank_op local_size local_size_op mpi_built mpi_enabled mpi_threads_supported
        nccl_built process_set_included_op rank rank_op record_gradients reducescatter remove_process_set
        rocm_built save shutdown size size_op start_timeline stop_timeline typed_errors
    """,
    "gradcomp.tf.keras": """
        Adasum Average DistributedOptimizer HorovodInternalError HostsUpdatedInterrupt Max Min
        PartialDistributedOptimizer ProcessSet Product Sum add_process_set allgather allreduce broadcast
        broadcast_global_variables callbacks ccl_built cross_rank cross_size cuda_built ddl_built
        global_process_set gloo_built gloo_enabled init is_initialized load_model local_rank local_size
        mpi_built mpi_enabled mpi_threads_supported nccl_built rank reducescatter remove_process_set rocm_built
        shutdown size start_timeline stop_timeline
    """,
    "gradcomp.tf.keras.callbacks": """
        BroadcastGlobalVariablesCallback LearningRateScheduleCallback LearningRateWarmupCallback
        MetricAverageCallback
    """,
    "gradcomp.tf.callbacks": """
        BackupAndRestore BroadcastGlobalVariables CompressionMetrics LearningRateSchedule LearningRateWarmup
        MetricAverage Progress
    """,
    "gradcomp.compress": """
        AdaComp BestRank BlockFloat CLTk Cast Codebook Compression Compressor DGC DensitySchedule EF21
        ErrorFeedback GlobalTopK GroupArray Identity LGC LocalClip MomentumCorrection NUQSGD OneBit Policy
        PowerSGD Quantize RandomBlock RandomK RedSync SIDCo ScaledSign Signum SpectralAtomo TernGrad Threshold
        TopK TwoLevelSelection UnbiasedRank Warmup
    """,
    "gradcomp.control": """
        ControllerRun Decision Environment PeriodObservations Periodic Step controller_from_string
    """,
    "gradcomp.analysis": """
        Information Plane Recording entropy gaussian_information gaussian_pair information_plane
        mutual_information read total_information
    """,
    "gradcomp.plots": """
        draw_information draw_profile
    """,
    "gradcomp.testing": """
        CHECKS Check Row Simulation check_compressor feedback forms_and_means wire
    """,
    "gradcomp.transport": """
        AllGather AllReduce AllToAll Exchange Handle Operation Transport
    """,
    "gradcomp.torch.sharded": """
        ShardedCompression compress_fsdp
    """,
}


@pytest.mark.parametrize("module", NAMES)
def test_public_names_of_earlier_versions_stay(module: str):
    if module.startswith(("gradcomp.tf", "gradcomp.torch")):
        pytest.importorskip("tensorflow" if module.startswith("gradcomp.tf") else "torch")
    found = importlib.import_module(module)
    names = NAMES[module].split()
    if module.startswith(("gradcomp.tf", "gradcomp.torch")) and module.count(".") == 1:
        names += NAMES["gradcomp"].split()
    for name in names:
        assert getattr(found, name) is not None
