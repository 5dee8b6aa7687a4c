// Rows exchanged for heads, and back, written straight into the peers' memory: nothing is packed before, nothing after.
//
// A run is a rectangle of rows times neighbouring heads of one tensor, which goes to one rank: a row of it lies together
// where it goes, and at least each head of it where it comes from. Bulk copies (sm_90) bring an item, some rows of a run,
// to shared memory and take it on. A link carries their long writes better than threads' stores of 16 bytes: on two H200s
// 372 against 320 GB/s. Some blocks serve the runs to other ranks, others those that stay, which take no share of theirs.
// A block is a warp: lanes start copies, and the ring of stages is what keeps many of them under way.

typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef long long int64;

constexpr int HELD = STAGES / 2;                // stages whose way out may be under way, while the others are filled
constexpr int PIECE = HEADS * HEAD_BYTES;       // of a row
constexpr int STAGE = ROWS * PIECE;

struct Run {
    const char* source;
    char* target;                               // in a peer's memory, or in this device's own
    int64 source_row, source_head, target_row;  // bytes
    int64 rows;
};

struct Exchange {
    Run runs[RUNS];                             // those to other ranks first
    int64 groups;                               // of ROWS rows, of the longest run
    int far, near;                              // runs
    int far_blocks;
};

__device__ __forceinline__ uint32 shared_address(const void* memory) {
    return static_cast<uint32>(__cvta_generic_to_shared(memory));
}

__device__ __forceinline__ void wait(uint64* barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(shared_address(barrier)), "r"(parity)
        : "memory");
}

__device__ __forceinline__ void expect(uint64* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bring(void* to, const char* from, int bytes, uint64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

__device__ __forceinline__ void take(char* to, const void* from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}

struct Item {
    const Run* run;
    int64 row;
    int rows;
};

__device__ __forceinline__ Item find(const Run* runs, int count, int64 item) {
    const Run* run = runs + item % count;
    const int64 row = item / count * ROWS, left = run->rows - row;
    return {run, row, static_cast<int>(left < 0 ? 0 : left < ROWS ? left : ROWS)};
}

__device__ __forceinline__ void fill(const Item& item, char* stage, uint64* full, int lane) {
    const Run& run = *item.run;
    if (lane == 0) expect(full, item.rows * PIECE);
    __syncwarp();
    const char* from = run.source + item.row * run.source_row;
    if (run.source_head == HEAD_BYTES) {
        if (lane < item.rows) bring(stage + lane * PIECE, from + lane * run.source_row, PIECE, full);
        return;
    }
    for (int i = lane; i < item.rows * HEADS; i += 32)
        bring(stage + i * HEAD_BYTES, from + i / HEADS * run.source_row + i % HEADS * run.source_head, HEAD_BYTES, full);
}

__device__ __forceinline__ void empty(const Item& item, const char* stage, int lane) {
    const Run& run = *item.run;
    if (lane < item.rows) take(run.target + (item.row + lane) * run.target_row, stage + lane * PIECE, PIECE);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(32) exchange(const __grid_constant__ Exchange job) {
    extern __shared__ __align__(128) char stages[];
    __shared__ uint64 full[STAGES];
    const int lane = threadIdx.x;
    if (lane == 0) {
        for (int i = 0; i < STAGES; ++i)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(full + i)));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    const bool away = blockIdx.x < job.far_blocks;
    const Run* runs = away ? job.runs : job.runs + job.far;
    const int count = away ? job.far : job.near;
    const int64 blocks = away ? job.far_blocks : gridDim.x - job.far_blocks;
    const int64 block = away ? blockIdx.x : blockIdx.x - job.far_blocks;
    const int64 items = job.groups * count, first = items * block / blocks, own = items * (block + 1) / blocks - first;
    for (int i = 0; i < STAGES && i < own; ++i) fill(find(runs, count, first + i), stages + i * STAGE, full + i, lane);
    for (int64 i = 0; i < own; ++i) {
        const int stage = i % STAGES;
        wait(full + stage, i / STAGES & 1);
        empty(find(runs, count, first + i), stages + stage * STAGE, lane);
        const int64 next = i - HELD + STAGES;   // goes where an item is out that has the last HELD behind it
        if (i < HELD || next >= own) continue;
        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(HELD) : "memory");
        __syncwarp();
        fill(find(runs, count, first + next), stages + next % STAGES * STAGE, full + next % STAGES, lane);
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
