// Sums over whole rows, in double precision: sixteen strided lanes, then a fixed tree.
//
// The definition fixes the order in which a lane adds, so that one block works on a row, and sixteen of its
// threads do the adding: a step costs what an addition takes. The others fetch: while a tile is added up from
// shared memory, the next is on its way to registers.

#include "block.cuh"

using namespace gradcomp;
using namespace gradcomp::cuda;

namespace gradcomp::cuda {

// Element k of thread t in a tile has the number (t / 16 * each + k) * 16 + t % 16: a thread's elements
// belong to one lane and follow each other there.
template <int each>
inline std::int64_t number(int k) {
    return (std::int64_t{threadIdx.x} / lanes * each + k) * lanes + threadIdx.x % lanes;
}

struct SquaresParams {
    std::uint64_t rows;
    std::uint64_t out;
};

struct TailParams {
    std::uint64_t rows;
    std::uint64_t thresholds;
    std::uint64_t counts, sums, squares, maxima;
};

// A tile's elements stay as they come from memory until the tile before is added up: loads wait for nothing.
template <class Element, class Widen>
inline double sum_of_squares(double* kept, const Element* x, std::int64_t length, Widen widen) {
    constexpr int each = 16, tile = 256 * each;
    double sum = 0.0;
    Element next[each];
    const auto fetch = [&](std::int64_t begin) {
#pragma unroll
        for (int k = 0; k < each; ++k) {
            const std::int64_t i = begin + number<each>(k);
            next[k] = i < length ? x[i] : Element{0};  // which changes no sum of squares
        }
    };
    fetch(0);
    for (std::int64_t begin = 0; begin < length; begin += tile) {
        __syncthreads();
#pragma unroll
        for (int k = 0; k < each; ++k) {
            const double wide = widen(next[k]);
            kept[number<each>(k)] = wide * wide;
        }
        __syncthreads();
        fetch(begin + tile);
        if (threadIdx.x < lanes) {
#pragma unroll 32
            for (int step = 0; step < tile / lanes; ++step)
                sum = sum + kept[step * lanes + static_cast<int>(threadIdx.x)];
        }
    }
    return sum;
}

inline double sum_of_squares(const Segment& segment) {
    __shared__ double kept[4096];  // once, not for each dtype
    if (segment.gradient == 0) return 0.0;
    const auto half = [](std::uint16_t x) { return splat(static_cast<std::int32_t>(x)); };
    switch (segment.dtype) {
        case Dtype::float64:
            return sum_of_squares(kept, at<double>(segment.gradient), segment.length,
                                  [](double x) { return x; });
        case Dtype::float16:
            return sum_of_squares(kept, at<std::uint16_t>(segment.gradient), segment.length,
                                  [&](std::uint16_t x) { return double{from_half(half(x)).v}; });
        case Dtype::bfloat16:
            return sum_of_squares(kept, at<std::uint16_t>(segment.gradient), segment.length,
                                  [&](std::uint16_t x) { return double{from_bfloat16(half(x)).v}; });
        default:
            return sum_of_squares(kept, at<float>(segment.gradient), segment.length,
                                  [](float x) { return double{x}; });
    }
}

}  // namespace gradcomp::cuda

KERNEL(256) squares(const SquaresParams* params) {
    double sum = sum_of_squares(at<Segment>(params->rows)[blockIdx.x]);
    if (threadIdx.x >= lanes) return;
    sum = half_warp_tree(sum);
    if (threadIdx.x == 0) to<double>(params->out)[blockIdx.x] = sum;
}

// Most elements of a tail are zero, and adding zero changes nothing: every thread notes which of its own are
// not, and the lanes add only these, in their order.
KERNEL(256) tail(const TailParams* params) {
    constexpr int each = 32, tile = 256 * each;
    constexpr int most_single = 8;  // one by one, a step takes about as long as four in a row
    __shared__ float kept[tile];
    __shared__ std::uint32_t present[256];
    const Segment segment = at<Segment>(params->rows)[blockIdx.x];
    const float threshold = at<float>(params->thresholds)[blockIdx.x];
    const float* const shadow = at<float>(segment.shadow);
    double sum = 0.0, squares = 0.0;
    std::int64_t count = 0;
    float largest = 0.0f, next[each];
    const auto fetch = [&](std::int64_t begin) {
#pragma unroll
        for (int k = 0; k < each; ++k) {
            const std::int64_t i = begin + number<each>(k);
            next[k] = i < segment.length ? shadow[i] : float_of(0x7FC00000);
        }
    };
    fetch(0);
    for (std::int64_t begin = 0; begin < segment.length; begin += tile) {
        __syncthreads();
        std::uint32_t own = 0;
#pragma unroll
        for (int k = 0; k < each; ++k) {
            float magnitude = float_of(bits_of(next[k]) & 0x7FFFFFFF);
            if (magnitude >= threshold)  // not NaN
                ++count;
            else
                magnitude = 0.0f;
            largest = magnitude > largest ? magnitude : largest;
            own |= (magnitude > 0.0f ? 1U : 0U) << k;
            kept[number<each>(k)] = magnitude;
        }
        present[threadIdx.x] = own;
        __syncthreads();
        fetch(begin + tile);
        if (threadIdx.x >= lanes) continue;
        const int lane = static_cast<int>(threadIdx.x);
        const auto add = [&](float magnitude) {
            const double x = static_cast<double>(magnitude);
            sum = sum + x;
            squares = squares + x * x;
        };
        for (int part = 0; part < 256 / lanes; ++part) {
            std::uint32_t left = present[part * lanes + lane];
            const float* const own_kept = kept + part * each * lanes + lane;
            if (__any_sync(half_warp_mask(), __popc(left) > most_single)) {
#pragma unroll
                for (int k = 0; k < each; ++k) add(own_kept[k * lanes]);
                continue;
            }
            for (; left != 0; left &= left - 1) add(own_kept[(__ffs(static_cast<int>(left)) - 1) * lanes]);
        }
    }
    count = reduce_block(count, [](std::int64_t a, std::int64_t b) { return a + b; });
    largest = reduce_block(largest, [](float a, float b) { return a > b ? a : b; });
    if (threadIdx.x >= lanes) return;
    sum = half_warp_tree(sum);
    squares = half_warp_tree(squares);
    if (threadIdx.x != 0) return;
    to<std::int64_t>(params->counts)[blockIdx.x] = count;
    to<double>(params->sums)[blockIdx.x] = sum;
    to<double>(params->squares)[blockIdx.x] = squares;
    to<float>(params->maxima)[blockIdx.x] = largest;
}
