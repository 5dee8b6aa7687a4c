// RMSNorm and rotation of heads of 128 bfloat16 channels: what one pass over the memory takes.
//
// 16 threads have a head, 8 neighbouring channels each; a block has a row, and several heads of it in flight. Channels
// that turn with each other are HALF apart, so that a thread's partner is HALF / 8 threads away.

typedef unsigned short uint16;
typedef unsigned int uint32;
typedef long long int64;

constexpr int HEAD = 128;
constexpr int CHANNELS = 8;                     // of a thread
constexpr int THREADS_OF_HEAD = HEAD / CHANNELS;
constexpr int HEADS_AT_ONCE = BLOCK / THREADS_OF_HEAD;
constexpr int UNROLLED = 4;                     // heads of a thread whose loads are in flight together
constexpr int PARTNER = HALF / CHANNELS;

static_assert(HALF % CHANNELS == 0 && 2 * HALF <= HEAD, "a thread's channels all turn alike");

struct Problem {
    const uint16 *x, *weight;   // bfloat16: [rows, heads, 128] with strides in elements, [128]
    const float *cos, *sin;     // [rows, HALF] with strides
    uint16* result;             // [rows, heads, 128] contiguous
    int64 row_stride, head_stride, cos_stride, sin_stride;
    int heads;
    float eps;
};

__device__ __forceinline__ void widen(const uint4& raw, float (&value)[CHANNELS]) {
    const uint32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        value[2 * i] = __uint_as_float(words[i] << 16);
        value[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
}

__device__ __forceinline__ uint32 to_pair(float low, float high) {
    uint32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(low), "f"(high));
    return pair;
}

// Eight angles of a row, rounded to bfloat16 as upstream does.
__device__ __forceinline__ void angles(const float* source, float (&value)[CHANNELS]) {
    const float4 low = __ldg(reinterpret_cast<const float4*>(source));
    const float4 high = __ldg(reinterpret_cast<const float4*>(source) + 1);
    widen(make_uint4(to_pair(low.x, low.y), to_pair(low.z, low.w), to_pair(high.x, high.y), to_pair(high.z, high.w)),
          value);
}

extern "C" __global__ __launch_bounds__(BLOCK) void norm_rotary(const __grid_constant__ Problem problem) {
    const int64 row = blockIdx.x;
    const int lane = threadIdx.x % THREADS_OF_HEAD, first = threadIdx.x / THREADS_OF_HEAD;
    const bool turns = lane < 2 * PARTNER, upper = lane >= PARTNER;
    const uint16* source = problem.x + row * problem.row_stride + lane * CHANNELS;
    uint16* result = problem.result + row * problem.heads * HEAD + lane * CHANNELS;
    float weight[CHANNELS], cos[CHANNELS], sin[CHANNELS];
    widen(__ldg(reinterpret_cast<const uint4*>(problem.weight + lane * CHANNELS)), weight);
    const int angle = lane % PARTNER * CHANNELS;
    angles(problem.cos + row * problem.cos_stride + angle, cos);
    angles(problem.sin + row * problem.sin_stride + angle, sin);
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i) {
        cos[i] = turns ? cos[i] : 1.f;
        sin[i] = !turns ? 0.f : upper ? sin[i] : -sin[i];
    }
    // All threads of a warp go round alike, as they exchange values: what is beyond the last head is not stored.
    for (int begin = 0; begin < problem.heads; begin += UNROLLED * HEADS_AT_ONCE) {
        const int start = begin + first;
        uint4 raw[UNROLLED];
#pragma unroll
        for (int i = 0; i < UNROLLED; ++i) {
            const int head = min(start + i * HEADS_AT_ONCE, problem.heads - 1);
            raw[i] = __ldg(reinterpret_cast<const uint4*>(source + head * problem.head_stride));
        }
#pragma unroll
        for (int i = 0; i < UNROLLED; ++i) {
            const int head = start + i * HEADS_AT_ONCE;
            float value[CHANNELS], squares = 0;
            widen(raw[i], value);
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) squares = fmaf(value[c], value[c], squares);
#pragma unroll
            for (int step = THREADS_OF_HEAD / 2; step; step /= 2)
                squares += __shfl_xor_sync(~0u, squares, step, THREADS_OF_HEAD);
            const float factor = rsqrtf(squares / HEAD + problem.eps);
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) value[c] *= factor * weight[c];
            float turned[CHANNELS];
            const int partner = upper ? lane - PARTNER : lane + PARTNER;
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) {
                const float other = __shfl_sync(~0u, value[c], partner, THREADS_OF_HEAD);
                turned[c] = fmaf(value[c], cos[c], other * sin[c]);
            }
            if (head < problem.heads)
                asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(result + head * HEAD),
                             "r"(to_pair(turned[0], turned[1])), "r"(to_pair(turned[2], turned[3])),
                             "r"(to_pair(turned[4], turned[5])), "r"(to_pair(turned[6], turned[7]))
                             : "memory");
        }
    }
}
