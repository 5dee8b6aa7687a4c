// Attention on Hopper's warpgroup matrix instructions, head dimension 128, in 8-bit floats (SAGE) or bfloat16.
//
// Compiled with ELEMENT_BYTES (1: E4M3, 2: bfloat16), KEYS (keys of a tile), STAGES, and the wgmma wrappers that
// hopper_attention.py writes in front. As in FlashAttention-3 (arXiv 2407.08608) a block has a warp that fetches and two
// warpgroups that compute, each of which has its next scores and its last weighted values made at once. Its turns on the
// tensor cores were tried, and taking turns at the softmax: neither gains anything here.
//
// Queries, keys and values come as tile images: exactly what a tile looks like in shared memory, so that bulk copies
// bring it; two blocks of a cluster fetch half of each for both. Values are turned, [channels, keys], and in 8-bit floats
// their keys are ordered as the accumulators' registers are, so that weights go from one product to the next as they
// lie. Preparing an image costs one pass over a tensor, which quantisation needs anyway.

typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef long long int64;

constexpr int HEAD = 128;
constexpr int QUERIES = 64;                          // rows of a warpgroup
constexpr int CONSUMERS = 2;                         // warpgroups that compute
constexpr int CLUSTER = 2;                           // blocks that share what they fetch of keys and values
constexpr int STEP = 32;                             // bytes that one wgmma takes of the inner dimension
constexpr int ROW_BYTES = HEAD * ELEMENT_BYTES;
constexpr int SCORE_STEPS = ROW_BYTES / STEP;
constexpr int VALUE_STEPS = KEYS * ELEMENT_BYTES / STEP;
constexpr int KEY_BYTES = KEYS * ELEMENT_BYTES;      // of a channel's values in a tile
constexpr int SPAN = KEY_BYTES % 128 == 0 ? 128 : KEY_BYTES % 64 == 0 ? 64 : 32;  // bytes that they are swizzled over
constexpr int QUERY_BYTES = QUERIES * ROW_BYTES;
constexpr int TILE_BYTES = KEYS * ROW_BYTES;
constexpr int SCORES = KEYS / 2;                     // a thread's scores of a tile: two rows of KEYS / 4
constexpr int SUMS = HEAD / 2;
constexpr int VOTES = STAGES + 1;                    // tiles whose votes are kept
constexpr int PACKED = SCORES * ELEMENT_BYTES / 4;   // registers of its weights
constexpr float WEIGHT_EXPONENT = ELEMENT_BYTES == 1 ? 8.f : 0.f;  // the largest weight is stored as 2^8
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float MINUS_INFINITY = __builtin_bit_cast(float, 0xFF800000u);
constexpr float AMAX_FLOOR = 1e-3f;
constexpr float E4M3_MAX = 448.f;

static_assert(KEYS * ELEMENT_BYTES % STEP == 0 && KEYS % 8 == 0, "a tile is a whole number of steps");

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
    return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// ---- barriers and copies

__device__ __forceinline__ void barrier_init(uint64* barrier, uint32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}

__device__ __forceinline__ void barrier_wait(uint64* barrier, uint32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra.uni passed;\nbra.uni again;\npassed:\n}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ uint32 cluster_rank() {
    uint32 rank;
    asm("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A warp is done with what a barrier guards, as seen by all blocks of the cluster, each of which writes to it.
__device__ __forceinline__ void release(uint64* barrier) {
    const uint32 lane = threadIdx.x % 32;
    if (lane >= CLUSTER) return;
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(barrier)),
        "r"(lane)
        : "memory");
}

__device__ __forceinline__ void expect(uint64* barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Copies `bytes` to this block's shared memory; `barrier` passes when they are there.
__device__ __forceinline__ void fetch(void* destination, const uint8* source, uint32 bytes, uint64* barrier) {
    expect(barrier, bytes);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(destination)),
                 "l"(source), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// Copies this block's share of a tile to all blocks of the cluster; each one's `barrier` passes when it has all shares.
__device__ __forceinline__ void fetch_share(uint8* destination, const uint8* source, uint32 rank, uint64* barrier) {
    constexpr uint32 SHARE = TILE_BYTES / CLUSTER;
    expect(barrier, TILE_BYTES);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
        "%4;" ::"r"(shared_address(destination + rank * SHARE)),
        "l"(source + rank * SHARE), "r"(SHARE), "r"(shared_address(barrier)), "h"(uint16((1 << CLUSTER) - 1))
        : "memory");
}

// Whether all four warps of a group would skip a tile, which each says in shared memory at its place among `votes`, under
// the tile's number. A warp that would not skip knows the answer, and goes on while the others still look.
__device__ __forceinline__ bool group_skips(uint32 votes, uint32 tile, bool low) {
    const bool mine = __all_sync(~0u, low);
    votes += tile % VOTES * 16;
    // All lanes store alike: a lane that did it for them would have to be found.
    asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(votes + threadIdx.x % 128 / 32 * 4), "r"(2 * tile + mine)
                 : "memory");
    if (!mine) return false;
    while (true) {
        uint32 vote[4], against = 0, agreeing = 0;
        asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(vote[0]), "=r"(vote[1]), "=r"(vote[2]), "=r"(vote[3])
                     : "r"(votes)
                     : "memory");
#pragma unroll
        for (int warp = 0; warp < 4; ++warp) {
            against += vote[warp] == 2 * tile;
            agreeing += vote[warp] == 2 * tile + 1;
        }
        // Lanes have read alike; the assembler must see that they do, or it has every product wait for the one before.
        if (__any_sync(~0u, against)) return false;
        if (__all_sync(~0u, agreeing == 4)) return true;
    }
}

// ---- matrix products; score_product and value_product come from hopper_attention.py

// An operand's place in shared memory, as descriptors have it: in units of 16 bytes, so that offsets can be added to it.
__device__ __forceinline__ uint32 operand(const void* pointer) { return shared_address(pointer) >> 4 | 1 << 16; }

// Descriptor of what lies so many bytes into a K-major operand whose rows are swizzled over WIDTH bytes.
template <int WIDTH>
__device__ __forceinline__ uint64 descriptor(uint32 operand, int bytes) {
    constexpr uint64 layout = WIDTH == 128 ? 1 : WIDTH == 64 ? 2 : 3, eight_rows = 8 * WIDTH;
    return uint64(operand + bytes / 16) | (eight_rows >> 4) << 32 | layout << 62;
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

template <int COUNT>
__device__ __forceinline__ void hold(float (&registers)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// Where byte `byte` of a row lies in an image of ROWS rows that are cut in columns of WIDTH bytes, one after the other,
// and swizzled over them in units of 16 bytes.
template <int WIDTH, int ROWS>
__device__ __forceinline__ int image_offset(int row, int byte) {
    constexpr int units = WIDTH / 16;
    return (byte / WIDTH * ROWS + row) * WIDTH + ((byte / 16 % units) ^ (row * units / 8 % units)) * 16 + byte % 16;
}

// Where step `step` of such an image's inner dimension begins.
template <int WIDTH, int ROWS>
__device__ __forceinline__ constexpr int step_offset(int step) {
    return step * STEP / WIDTH * ROWS * WIDTH + step * STEP % WIDTH;
}

__device__ __forceinline__ void make_scores(float (&scores)[SCORES], uint32 queries, uint32 keys) {
#pragma unroll
    for (int step = 0; step < SCORE_STEPS; ++step)
        score_product(scores, descriptor<128>(queries, step_offset<128, QUERIES>(step)),
                      descriptor<128>(keys, step_offset<128, KEYS>(step)), step > 0);
    products_commit();
}

__device__ __forceinline__ void add_values(float (&sums)[SUMS], const uint32 (&weights)[PACKED], uint32 values) {
#pragma unroll
    for (int step = 0; step < VALUE_STEPS; ++step)
        value_product(sums, weights + 4 * step, descriptor<SPAN>(values, step_offset<SPAN, HEAD>(step)));
    products_commit();
}

// ---- softmax

__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float quad_maximum(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// A thread's scores are those of two rows, 8 apart: of each 4, the first two are the upper row's.
struct Rows {
    float factor[2];   // from a score to log2 of a weight, apart from the key tile's scale
    float maximum[2];  // largest log2 so far
    float total[2];    // sum of this thread's weights
};

__device__ __forceinline__ void hide_padding(float (&scores)[SCORES], int keys_left) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < SCORES; ++i)
        if (i / 4 * 8 + column + i % 2 >= keys_left) scores[i] = MINUS_INFINITY;
    hold(scores);  // or the compiler has every tile pay for the last one's padding, by selecting instead of branching
}

// Reductions go along four chains at once, so that none waits for its own last step.
__device__ __forceinline__ void tile_maxima(const float (&scores)[SCORES], float (&largest)[2]) {
    float chain[4] = {scores[0], scores[1], scores[2], scores[3]};
#pragma unroll
    for (int i = 4; i < SCORES; ++i) chain[i % 4] = fmaxf(chain[i % 4], scores[i]);
#pragma unroll
    for (int row = 0; row < 2; ++row) largest[row] = quad_maximum(fmaxf(chain[2 * row], chain[2 * row + 1]));
}

// Whether both rows' largest weights of a tile, relative to the largest so far, are below their limits, in log2.
__device__ __forceinline__ bool is_low(const Rows& rows, const float (&largest)[2], float key_scale,
                                       const float (&limits)[2]) {
    return largest[0] * (rows.factor[0] * key_scale) - rows.maximum[0] < limits[0] &&
           largest[1] * (rows.factor[1] * key_scale) - rows.maximum[1] < limits[1];
}

// Scores become weights; `correction` is what earlier sums shrink by.
__device__ __forceinline__ void exponentiate(float (&scores)[SCORES], Rows& rows, const float (&largest)[2],
                                             float key_scale, float (&correction)[2]) {
    float factor[2], shift[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        factor[row] = rows.factor[row] * key_scale;
        const float maximum = fmaxf(rows.maximum[row], largest[row] * factor[row]);
        correction[row] = power_of_two(rows.maximum[row] - maximum);
        rows.maximum[row] = maximum;
        shift[row] = WEIGHT_EXPONENT - maximum;
    }
    float chain[4] = {};
#pragma unroll
    for (int i = 0; i < SCORES; ++i) {
        scores[i] = power_of_two(fmaf(scores[i], factor[i / 2 % 2], shift[i / 2 % 2]));
        chain[i % 4] += scores[i];
    }
#pragma unroll
    for (int row = 0; row < 2; ++row)
        rows.total[row] = fmaf(rows.total[row], correction[row], chain[2 * row] + chain[2 * row + 1]);
    hold(scores);  // made here, not where they are used
}

// Always 0, since sums of weights are not negative. The assembler does not know that, and so cannot put the sums off past
// a wait that this has part in: 151 instead of 154 ms at 58,880 rows. 8-bit attention is faster if it can, 103 to 106 ms.
__device__ __forceinline__ uint32 never(const Rows& rows) {
    return ELEMENT_BYTES == 2 && rows.total[0] + rows.total[1] < 0.f;
}

__device__ __forceinline__ void pack(const float (&scores)[SCORES], uint32 (&weights)[PACKED]) {
#if ELEMENT_BYTES == 1
#pragma unroll
    for (int i = 0; i < PACKED; ++i) {  // register i: columns of two neighbouring groups of 8, of the upper or lower row
        const int first = i / 2 * 8 + i % 2 * 2;
        asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
            "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
            : "=r"(weights[i])
            : "f"(scores[first]), "f"(scores[first + 1]), "f"(scores[first + 4]), "f"(scores[first + 5]));
    }
#else
#pragma unroll
    for (int i = 0; i < PACKED; ++i)
        asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(weights[i]) : "f"(scores[2 * i]), "f"(scores[2 * i + 1]));
#endif
}

__device__ __forceinline__ void rescale(float (&sums)[SUMS], const float (&correction)[2]) {
    if (!__any_sync(~0u, correction[0] != 1.f || correction[1] != 1.f)) return;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] *= correction[i / 2 % 2];
}

// ---- attention

struct Shared {
    uint8 queries[CONSUMERS][QUERY_BYTES];
    uint8 keys[STAGES][TILE_BYTES];
    uint8 values[STAGES][TILE_BYTES];
    uint64 queries_full, keys_full[STAGES], keys_empty[STAGES], values_full[STAGES], values_empty[STAGES];
    // A place is written again when all warps have released keys that come after those it was read for.
    alignas(16) uint32 votes[CONSUMERS][VOTES][4];
};

struct Stage {  // a place in a ring of stages, and the parity of its barriers
    int index = 0;
    uint32 parity = 0;
    __device__ __forceinline__ void advance() {
        if (++index == STAGES) index = 0, parity ^= 1;
    }
};

struct Problem {
    const uint8 *queries, *keys, *values;  // images, [heads, tiles, bytes]
    const float *query_scales;             // [heads, query tiles * 64]
    const float *key_scales;               // [heads, key tiles]
    const float *value_scales;             // [heads, 128]
    const int64* valid_rows;               // [1]
    const float* threshold;                // [1]
    uint16* result;                        // bfloat16, strides in elements
    uint64* skipped;                       // [heads]
    int64 batch_stride, row_stride, head_stride, rows;
    int heads;         // of one batch entry
    int query_tiles;   // of 64 rows, a multiple of CONSUMERS * CLUSTER
    int key_tiles;
    float scale;
};

__device__ __forceinline__ void produce(const Problem& problem, Shared& shared, int head, int tiles) {
    const uint8* queries = problem.queries + (int64(head) * problem.query_tiles + 2 * blockIdx.x) * QUERY_BYTES;
    fetch(shared.queries, queries, CONSUMERS * QUERY_BYTES, &shared.queries_full);
    const uint8* keys = problem.keys + int64(head) * problem.key_tiles * TILE_BYTES;
    const uint8* values = problem.values + int64(head) * problem.key_tiles * TILE_BYTES;
    const uint32 rank = cluster_rank();
    Stage stage;
    for (int tile = 0; tile < tiles; ++tile, stage.advance()) {
        const int at = stage.index;
        barrier_wait(&shared.keys_empty[at], stage.parity ^ 1);
        fetch_share(shared.keys[at], keys + int64(tile) * TILE_BYTES, rank, &shared.keys_full[at]);
        barrier_wait(&shared.values_empty[at], stage.parity ^ 1);
        fetch_share(shared.values[at], values + int64(tile) * TILE_BYTES, rank, &shared.values_full[at]);
    }
}

// Of a tile of keys; only 8-bit ones have scales.
__device__ __forceinline__ float key_scale_of(const float* scales, int tile) {
    return ELEMENT_BYTES == 1 ? __ldg(scales + tile) : 1.f;
}

// What follows the product of a tile: its keys are let go, its padding is hidden, its maxima are found, and its values are
// waited for.
__device__ __forceinline__ void finish_scores(float (&scores)[SCORES], float (&largest)[2], Shared& shared, Stage& keys,
                                              const Stage& values, int tile, int tiles, int64 valid) {
    hold(scores);
    release(&shared.keys_empty[keys.index]);
    if (tile == tiles - 1) hide_padding(scores, static_cast<int>(valid - int64(tile) * KEYS));
    tile_maxima(scores, largest);
    barrier_wait(&shared.values_full[values.index], values.parity);
    keys.advance();
}

// All key tiles of one warpgroup's queries; a row would skip a tile whose largest weight is below its limit, in log2.
// Leaves sums of weighted values and returns how many tiles were skipped.
template <bool SKIPPING>
__device__ __forceinline__ int consume(const Problem& problem, Shared& shared, int group, int head, int tiles,
                                       int64 valid, const float (&limits)[2], Rows& rows, float (&sums)[SUMS]) {
    const float* key_scales = problem.key_scales + int64(head) * problem.key_tiles;
    const uint32 queries = operand(shared.queries[group]);
    const uint32 key_tiles = operand(shared.keys[0]), value_tiles = operand(shared.values[0]);
    const uint32 votes = shared_address(shared.votes[group]);
    float scores[SCORES], largest[2], correction[2];
    uint32 weights[PACKED];
    Stage keys, values, next;  // where the next keys are, the values that are not let go yet, and a tile's own values
    int skipped = 0;

    float key_scale = key_scale_of(key_scales, 0), next_scale = key_scale_of(key_scales, min(1, tiles - 1));
    barrier_wait(&shared.queries_full, 0);
    barrier_wait(&shared.keys_full[0], 0);
    products_begin();
    make_scores(scores, queries, key_tiles);
    products_wait<0>();
    finish_scores(scores, largest, shared, keys, next, 0, tiles, valid);
    exponentiate(scores, rows, largest, key_scale, correction);
    pack(scores, weights);

    if (tiles > 1) barrier_wait(&shared.keys_full[keys.index], keys.parity);
    for (int tile = 1; tile < tiles; ++tile) {
        key_scale = next_scale;
        next_scale = key_scale_of(key_scales, min(tile + 1, tiles - 1));
        next.advance();
        products_begin();
        make_scores(scores, queries, key_tiles + keys.index * (TILE_BYTES / 16));
        add_values(sums, weights, value_tiles + values.index * (TILE_BYTES / 16));
        products_wait<1>();
        // What is needed next is waited for in there and below, not when it is needed: these waits end a block of
        // instructions. Within one, the assembler moves waits for products up to its beginning.
        finish_scores(scores, largest, shared, keys, next, tile, tiles, valid);
        // Tiles that are skipped are passed over in a loop of their own: where there is none, this one is as when dense.
        while (SKIPPING && group_skips(votes, tile, is_low(rows, largest, key_scale, limits))) {
            ++skipped;
            products_wait<0>();
            hold(sums);
            release(&shared.values_empty[values.index]);
            values = next;
            if (++tile == tiles) return skipped;
            key_scale = next_scale;
            next_scale = key_scale_of(key_scales, min(tile + 1, tiles - 1));
            next.advance();
            barrier_wait(&shared.keys_full[keys.index], keys.parity);
            products_begin();
            make_scores(scores, queries, key_tiles + keys.index * (TILE_BYTES / 16));
            products_wait<0>();
            finish_scores(scores, largest, shared, keys, next, tile, tiles, valid);
        }
        exponentiate(scores, rows, largest, key_scale, correction);
        if (tile + 1 < tiles) barrier_wait(&shared.keys_full[keys.index], keys.parity ^ never(rows));
        products_wait<0>();
        hold(sums);
        release(&shared.values_empty[values.index]);
        values = next;
        pack(scores, weights);
        rescale(sums, correction);
    }
    products_begin();
    add_values(sums, weights, value_tiles + values.index * (TILE_BYTES / 16));
    products_wait<0>();
    hold(sums);
    return skipped;
}

__device__ __forceinline__ void store(const Problem& problem, int head, int64 row, const float (&sums)[SUMS],
                                      const Rows& rows) {
    const int64 batch = head / problem.heads, column = threadIdx.x % 4 * 2;
    const float* value_scales = problem.value_scales + int64(head) * HEAD;
    uint16* result = problem.result + batch * problem.batch_stride + head % problem.heads * problem.head_stride;
    const float inverse[2] = {1.f / quad_sum(rows.total[0]), 1.f / quad_sum(rows.total[1])};
    const int64 valid = *problem.valid_rows;
#pragma unroll
    for (int i = 0; i < HEAD / 8; ++i) {
        const int64 channel = 8 * i + column;
        const float2 scales = *reinterpret_cast<const float2*>(value_scales + channel);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int64 at = row + 8 * half;
            const float factor = at < valid ? inverse[half] : 0.f;
            uint32 pair;
            asm("cvt.rn.bf16x2.f32 %0, %2, %1;"
                : "=r"(pair)
                : "f"(sums[4 * i + 2 * half] * factor * scales.x), "f"(sums[4 * i + 2 * half + 1] * factor * scales.y));
            if (at < problem.rows) *reinterpret_cast<uint32*>(result + at * problem.row_stride + channel) = pair;
        }
    }
}

__device__ __forceinline__ void start_barriers(Shared& shared) {
    barrier_init(&shared.queries_full, 1);
    for (int i = 0; i < STAGES; ++i) {
        barrier_init(&shared.keys_full[i], 1);
        barrier_init(&shared.values_full[i], 1);
        barrier_init(&shared.keys_empty[i], CLUSTER * CONSUMERS * 4);
        barrier_init(&shared.values_empty[i], CLUSTER * CONSUMERS * 4);
    }
    for (int i = 0; i < CONSUMERS * VOTES * 4; ++i) (&shared.votes[0][0][0])[i] = 0;
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

extern "C" __global__ __cluster_dims__(CLUSTER, 1, 1)
__launch_bounds__(384, 1) void attend(const __grid_constant__ Problem problem) {
    extern __shared__ uint8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>((reinterpret_cast<uint64>(memory) + 1023) / 1024 * 1024);
    // From one lane, so that the assembler knows it to be the warp's, and has what follows of it in uniform registers.
    const int head = blockIdx.y, group = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128), 0) - 1;
    const int64 valid = *problem.valid_rows;
    const int tiles = static_cast<int>((valid + KEYS - 1) / KEYS);
    if (threadIdx.x == 0) start_barriers(shared);
    cluster_wait();
    if (group < 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) produce(problem, shared, head, tiles);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int64 row = int64(blockIdx.x) * QUERIES * CONSUMERS + group * QUERIES + threadIdx.x % 128 / 32 * 16 +
                          threadIdx.x % 32 / 4;
        const float* scales = problem.query_scales + int64(head) * problem.query_tiles * QUERIES + row;
        Rows rows = {{scales[0] * problem.scale * LOG2_E, scales[8] * problem.scale * LOG2_E},
                     {MINUS_INFINITY, MINUS_INFINITY},
                     {0, 0}};
        float sums[SUMS] = {};
        // Padding rows would skip everything, and so have no part in a vote.
        const float limit = log2f(*problem.threshold), none = -MINUS_INFINITY;
        const float limits[2] = {row < valid ? limit : none, row + 8 < valid ? limit : none};
        if (*problem.threshold > 0) {
            const int skipped = consume<true>(problem, shared, group, head, tiles, valid, limits, rows, sums);
            if (threadIdx.x % 128 == 0 && row < valid) atomicAdd(problem.skipped + head, static_cast<uint64>(skipped));
        } else {
            consume<false>(problem, shared, group, head, tiles, valid, limits, rows, sums);
        }
        store(problem, head, row, sums, rows);
    }
    cluster_wait();  // until nobody writes to this block's memory any more
}

// ---- images. A tensor is [batch, rows, heads, 128] with strides in elements, of bfloat16; 16 threads take a row.

struct Tensor {
    const uint16* data;
    int64 batch_stride, row_stride, head_stride;
    __device__ __forceinline__ const uint16* row(int head, int heads, int64 row) const {
        return data + head / heads * batch_stride + head % heads * head_stride + row * row_stride;
    }
};

struct Eight {  // neighbouring channels of a row
    float value[8];
};

__device__ __forceinline__ uint4 read_raw(const uint16* source) { return __ldg(reinterpret_cast<const uint4*>(source)); }

__device__ __forceinline__ Eight widen(uint4 raw) {
    const uint32 words[4] = {raw.x, raw.y, raw.z, raw.w};
    Eight eight;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        eight.value[2 * i] = __uint_as_float(words[i] << 16);
        eight.value[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
    return eight;
}

__device__ __forceinline__ Eight read_eight(const uint16* source) { return widen(read_raw(source)); }

__device__ __forceinline__ Eight less(Eight eight, const Eight& other) {
#pragma unroll
    for (int i = 0; i < 8; ++i) eight.value[i] -= other.value[i];
    return eight;
}

__device__ __forceinline__ Eight times(Eight eight, float factor) {
#pragma unroll
    for (int i = 0; i < 8; ++i) eight.value[i] *= factor;
    return eight;
}

__device__ __forceinline__ float largest_magnitude(const Eight& eight) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(eight.value[i]));
    return largest;
}

__device__ __forceinline__ uint16 to_e4m3_pair(float low, float high) {
    uint16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(pair) : "f"(low), "f"(high));
    return pair;
}

__device__ __forceinline__ uint32 to_bfloat16_pair(float low, float high) {
    uint32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(low), "f"(high));
    return pair;
}

// Writes eight channels of a row to an image of ROWS rows.
template <int ROWS>
__device__ __forceinline__ void write_eight(uint8* image, int row, int channel, const Eight& eight) {
    uint8* place = image + image_offset<128, ROWS>(row, channel * ELEMENT_BYTES);
    const float* v = eight.value;
#if ELEMENT_BYTES == 1
    const uint32 low = to_e4m3_pair(v[0], v[1]) | uint32(to_e4m3_pair(v[2], v[3])) << 16;
    const uint32 high = to_e4m3_pair(v[4], v[5]) | uint32(to_e4m3_pair(v[6], v[7])) << 16;
    *reinterpret_cast<uint2*>(place) = make_uint2(low, high);
#else
    *reinterpret_cast<uint4*>(place) = make_uint4(to_bfloat16_pair(v[0], v[1]), to_bfloat16_pair(v[2], v[3]),
                                                  to_bfloat16_pair(v[4], v[5]), to_bfloat16_pair(v[6], v[7]));
#endif
}

struct Preparation {
    Tensor source;
    const int64* valid_rows;  // [1]
    const float* mean;        // of keys, [heads, 128]
    uint8* image;             // [heads, tiles, bytes]
    float* scales;            // one a row of queries or a tile of keys; values read theirs, [heads, 128]
    float* partial;           // [chunks, heads, 128]
    int heads;                // of one batch entry
    int chunks;
};

constexpr int ROWS_AT_ONCE = 16;  // of 256 threads
constexpr int CHUNK = 512;        // rows of one block's statistics

// Sums of keys (blockIdx.z 0), or largest magnitudes of values (1), of each channel over a chunk of rows.
__device__ __forceinline__ void chunk_statistics(const Preparation& job, bool magnitudes) {
    __shared__ float reduced[ROWS_AT_ONCE][HEAD];
    const int head = blockIdx.y, line = threadIdx.x / 16, channel = threadIdx.x % 16 * 8;
    const int64 first = int64(blockIdx.x) * CHUNK, valid = *job.valid_rows;
    float found[8] = {};
    for (int64 row = first + line; row < min(first + CHUNK, valid); row += ROWS_AT_ONCE) {
        const Eight eight = read_eight(job.source.row(head, job.heads, row) + channel);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            found[i] = magnitudes ? fmaxf(found[i], fabsf(eight.value[i])) : found[i] + eight.value[i];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) reduced[line][channel + i] = found[i];
    __syncthreads();
    if (threadIdx.x >= HEAD) return;
    float all = reduced[0][threadIdx.x];
    for (int i = 1; i < ROWS_AT_ONCE; ++i)
        all = magnitudes ? fmaxf(all, reduced[i][threadIdx.x]) : all + reduced[i][threadIdx.x];
    job.partial[(int64(blockIdx.x) * gridDim.y + head) * HEAD + threadIdx.x] = all;
}

extern "C" __global__ __launch_bounds__(256) void statistics(const __grid_constant__ Preparation keys,
                                                             const __grid_constant__ Preparation values) {
    chunk_statistics(blockIdx.z ? values : keys, blockIdx.z);
}

// Chunks' statistics to the keys' mean and the values' scales, in a fixed order: equal runs give equal bits.
extern "C" __global__ __launch_bounds__(128) void combine(const __grid_constant__ Preparation keys,
                                                          const __grid_constant__ Preparation values, float* mean) {
    const int64 at = int64(blockIdx.x) * HEAD + threadIdx.x, step = int64(gridDim.x) * HEAD;
    float sum = 0, largest = 0;
    for (int chunk = 0; chunk < keys.chunks; ++chunk) {
        sum += keys.partial[chunk * step + at];
        largest = fmaxf(largest, values.partial[chunk * step + at]);
    }
    mean[at] = sum / static_cast<float>(*keys.valid_rows);
    values.scales[at] = fmaxf(largest, AMAX_FLOOR) / E4M3_MAX;
}

// A tile of 64 queries, each row with a scale of its own.
extern "C" __global__ __launch_bounds__(256) void prepare_queries(const __grid_constant__ Preparation job) {
    const int head = blockIdx.y, line = threadIdx.x / 16, channel = threadIdx.x % 16 * 8;
    const int64 tile = int64(head) * gridDim.x + blockIdx.x, valid = *job.valid_rows;
#pragma unroll
    for (int row = line; row < QUERIES; row += ROWS_AT_ONCE) {
        const int64 at = int64(blockIdx.x) * QUERIES + row;
        Eight eight = {};
        if (at < valid) eight = read_eight(job.source.row(head, job.heads, at) + channel);
        float scale = 1;
#if ELEMENT_BYTES == 1
        float largest = largest_magnitude(eight);
        for (int lane = 8; lane; lane /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lane));
        scale = fmaxf(largest, AMAX_FLOOR) / E4M3_MAX;
        eight = times(eight, 1 / scale);
#endif
        write_eight<QUERIES>(job.image + tile * QUERY_BYTES, row, channel, eight);
        if (channel == 0) job.scales[tile * QUERIES + row] = scale;
    }
}

__device__ __forceinline__ float block_maximum(float x) {
    __shared__ float warps[8];
    for (int lane = 16; lane; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    for (int i = 0; i < 8; ++i) x = fmaxf(x, warps[i]);
    return x;
}

// A tile of keys without their mean, under one scale.
extern "C" __global__ __launch_bounds__(256) void prepare_keys(const __grid_constant__ Preparation job) {
    constexpr int PASSES = (KEYS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    const int head = blockIdx.y, line = threadIdx.x / 16, channel = threadIdx.x % 16 * 8;
    const int64 tile = int64(head) * gridDim.x + blockIdx.x, valid = *job.valid_rows;
    Eight mean = {};
    uint4 rows[PASSES];
#if ELEMENT_BYTES == 1
    for (int i = 0; i < 8; ++i) mean.value[i] = job.mean[int64(head) * HEAD + channel + i];
#endif
    float largest = 0;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int row = pass * ROWS_AT_ONCE + line;
        const int64 at = int64(blockIdx.x) * KEYS + row;
        const bool real = row < KEYS && at < valid;
        rows[pass] = real ? read_raw(job.source.row(head, job.heads, at) + channel) : uint4{};
        if (real) largest = fmaxf(largest, largest_magnitude(less(widen(rows[pass]), mean)));
    }
    float scale = 1;
#if ELEMENT_BYTES == 1
    scale = fmaxf(block_maximum(largest), AMAX_FLOOR) / E4M3_MAX;
#endif
    const float inverse = 1 / scale;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int row = pass * ROWS_AT_ONCE + line;
        const bool real = int64(blockIdx.x) * KEYS + row < valid;
        const Eight eight = real ? times(less(widen(rows[pass]), mean), inverse) : Eight{};
        if (row < KEYS) write_eight<KEYS>(job.image + tile * TILE_BYTES, row, channel, eight);
    }
    if (threadIdx.x == 0) job.scales[tile] = scale;
}

// The key that lies at a place of a turned row: E4M3 weights lie in registers by pairs of columns 8 apart.
__device__ __forceinline__ int key_at(int place) {
    return ELEMENT_BYTES == 2 ? place : place / 16 * 16 + place / 2 % 2 * 8 + place % 16 / 4 * 2 + place % 2;
}

// A tile of values, turned.
extern "C" __global__ __launch_bounds__(256) void prepare_values(const __grid_constant__ Preparation job) {
    constexpr int PITCH = ROW_BYTES + 8;
    extern __shared__ uint8 rows[];
    const int head = blockIdx.y, line = threadIdx.x / 16, channel = threadIdx.x % 16 * 8;
    const int64 tile = int64(head) * gridDim.x + blockIdx.x, valid = *job.valid_rows;
    float inverse[8];
    for (int i = 0; i < 8; ++i) inverse[i] = ELEMENT_BYTES == 1 ? 1 / job.scales[int64(head) * HEAD + channel + i] : 1;
    for (int row = line; row < KEYS; row += ROWS_AT_ONCE) {
        const int64 at = int64(blockIdx.x) * KEYS + row;
        Eight eight = {};
        if (at < valid) eight = read_eight(job.source.row(head, job.heads, at) + channel);
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const float low = eight.value[i] * inverse[i], high = eight.value[i + 1] * inverse[i + 1];
            uint8* place = rows + row * PITCH + (channel + i) * ELEMENT_BYTES;
#if ELEMENT_BYTES == 1
            *reinterpret_cast<uint16*>(place) = to_e4m3_pair(low, high);
#else
            *reinterpret_cast<uint32*>(place) = to_bfloat16_pair(low, high);
#endif
        }
    }
    __syncthreads();
    constexpr int UNIT_KEYS = 16 / ELEMENT_BYTES;
    uint8* image = job.image + tile * TILE_BYTES;
    for (int piece = threadIdx.x; piece < TILE_BYTES / 16; piece += 256) {
        const int c = piece % HEAD, unit = piece / HEAD;
        uint32 words[4] = {};
#pragma unroll
        for (int i = 0; i < UNIT_KEYS; ++i) {
            const uint8* place = rows + key_at(unit * UNIT_KEYS + i) * PITCH + c * ELEMENT_BYTES;
#if ELEMENT_BYTES == 1
            words[i / 4] |= uint32(*place) << i % 4 * 8;
#else
            words[i / 2] |= uint32(*reinterpret_cast<const uint16*>(place)) << i % 2 * 16;
#endif
        }
        *reinterpret_cast<uint4*>(image + image_offset<SPAN, HEAD>(c, unit * 16)) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
}
