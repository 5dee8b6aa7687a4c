// Rows exchanged for heads, and back, by plain stores into the peers' memory: nothing is packed before, nothing after.
//
// A run is a rectangle of rows times neighbouring heads of one tensor, which goes to one rank: a row of it lies together
// where it goes, and each head of it where it comes from. A thread has 16 bytes of a row and several rows in flight.
// Items are groups of rows of every run in turn, so that each block always has stores under way to every rank, and a
// block's share is the same number of items as any other's.

typedef long long int64;

constexpr int THREADS = VECTORS * LANES;
constexpr int ROWS = LANES * UNROLLED;          // of an item

struct Run {
    const char* source;
    char* target;                               // in a peer's memory, or in this device's own
    int64 source_row, source_head, target_row;  // bytes
    int64 rows;
};

struct Exchange {
    Run runs[RUNS];
    int64 count;                                // of runs
    int64 items;
};

__device__ __forceinline__ uint4 load(const char* from) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(from));
    return value;
}

__device__ __forceinline__ void store(char* to, uint4 value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
        :: "l"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w) : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS) exchange(const __grid_constant__ Exchange job) {
    const int lane = threadIdx.x / VECTORS, vector = threadIdx.x % VECTORS;
    const int64 head = vector / HEAD_VECTORS, within = 16 * (vector % HEAD_VECTORS);
    const int64 last = job.items * (blockIdx.x + 1) / gridDim.x;
    for (int64 item = job.items * blockIdx.x / gridDim.x; item < last; ++item) {
        const Run& run = job.runs[item % job.count];
        const int64 row = item / job.count * ROWS + lane;
        const char* from = run.source + row * run.source_row + head * run.source_head + within;
        char* to = run.target + row * run.target_row + 16 * vector;
        uint4 held[UNROLLED];
#pragma unroll
        for (int i = 0; i < UNROLLED; ++i)
            if (row + i * LANES < run.rows) held[i] = load(from + i * LANES * run.source_row);
#pragma unroll
        for (int i = 0; i < UNROLLED; ++i)
            if (row + i * LANES < run.rows) store(to + i * LANES * run.target_row, held[i]);
    }
}
