// Sums over whole rows, in double precision and in the order of reference_memory.py: each half warp adds up a
// chunk of its own, a block joins sixteen of them, and a second kernel joins what the blocks of a row leave.

#include "block.cuh"

using namespace gradcomp;
using namespace gradcomp::cuda;

namespace gradcomp::cuda {

inline constexpr int chunks_of_block = 16;

// Call add(element) for every sixteenth element of a chunk, zero beyond its end. Elements stay as they come
// from memory until those before are added: loads wait for nothing.
template <class Element, class Add>
inline void for_lane(const Element* x, std::int64_t count, Add add) {
    constexpr int each = 16;
    const int lane = static_cast<int>(threadIdx.x) % 16;
    Element next[each];
    const auto fetch = [&](std::int64_t begin) {
#pragma unroll
        for (int k = 0; k < each; ++k) {
            const std::int64_t i = begin + 16 * k + lane;
            next[k] = i < count ? x[i] : Element{0};
        }
    };
    fetch(0);
    for (std::int64_t begin = 0; begin < count; begin += 16 * each) {
        Element here[each];
#pragma unroll
        for (int k = 0; k < each; ++k) here[k] = next[k];
        fetch(begin + 16 * each);
#pragma unroll
        for (int k = 0; k < each; ++k) add(here[k]);
    }
}

// The part of a row that half a warp adds up.
struct Chunk {
    Segment segment;
    std::int64_t row, begin, count;

    Chunk(std::uint64_t rows, std::uint64_t begins, std::int64_t row_count) {
        const auto* tiles = at<std::int64_t>(begins);
        row = row_of(tiles, row_count, blockIdx.x);
        segment = at<Segment>(rows)[row];
        begin = ((blockIdx.x - tiles[row]) * chunks_of_block + threadIdx.x / 16) * chunk_elements;
        count = smaller(chunk_elements, segment.length - begin);
    }
};

// What a block leaves: the sum of its chunks, of which all threads bring their lanes.
inline void write_sum(std::uint64_t sums, std::int64_t place, double lane) {
    const double sum = tree_of_half_warps<chunks_of_block>(half_warp_tree(lane));
    if (threadIdx.x == 0) to<double>(sums)[place] = sum;
}

struct SquaresParams {
    std::uint64_t rows, tiles;
    std::int64_t row_count;
    std::uint64_t sums;
};

struct TailParams {
    std::uint64_t rows, tiles;
    std::int64_t row_count;
    std::uint64_t sums;  // of magnitudes, a block each, then of their squares
    std::uint64_t thresholds;
    std::uint64_t counts, maxima;  // from zero on
};

struct JoinParams {
    std::uint64_t tiles;
    std::int64_t row_count;
    std::uint64_t sums, workspace;     // one after another, for each kind of sum
    std::uint64_t first, second;  // what becomes of each kind
};

template <class Element, class Widen>
inline double sum_of_squares(const Chunk& chunk, Widen widen) {
    double sum = 0.0;
    for_lane(at<Element>(chunk.segment.gradient) + chunk.begin, chunk.count, [&](Element x) {
        const double wide = widen(x);
        sum = sum + wide * wide;
    });
    return sum;
}

inline double sum_of_squares(const Chunk& chunk) {
    if (chunk.segment.gradient == 0) return 0.0;
    const auto half = [](std::uint16_t x) { return splat(static_cast<std::int32_t>(x)); };
    switch (chunk.segment.dtype) {
        case Dtype::float64:
            return sum_of_squares<double>(chunk, [](double x) { return x; });
        case Dtype::float16:
            return sum_of_squares<std::uint16_t>(
                chunk, [&](std::uint16_t x) { return double{from_half(half(x)).v}; });
        case Dtype::bfloat16:
            return sum_of_squares<std::uint16_t>(
                chunk, [&](std::uint16_t x) { return double{from_bfloat16(half(x)).v}; });
        default:
            return sum_of_squares<float>(chunk, [](float x) { return double{x}; });
    }
}

}  // namespace gradcomp::cuda

KERNEL(256) squares(const SquaresParams __grid_constant__ params) {
    const Chunk chunk(params.rows, params.tiles, params.row_count);
    write_sum(params.sums, blockIdx.x, sum_of_squares(chunk));
}

KERNEL(256) tail(const TailParams __grid_constant__ params) {
    const Chunk chunk(params.rows, params.tiles, params.row_count);
    const float threshold = at<float>(params.thresholds)[chunk.row];
    double sum = 0.0, squares = 0.0;
    std::int64_t count = 0;
    float largest = 0.0f;
    std::int64_t left = chunk.count - static_cast<std::int64_t>(threadIdx.x % 16);
    for_lane(at<float>(chunk.segment.next_residual) + chunk.begin, chunk.count, [&](float x) {
        const float magnitude = float_of(bits_of(x) & 0x7FFFFFFF);
        const bool chosen = magnitude >= threshold;  // NaN is not
        if (chosen && left > 0) ++count;
        left -= 16;
        const double wide = chosen ? static_cast<double>(magnitude) : 0.0;
        sum = sum + wide;
        squares = squares + wide * wide;
        largest = chosen && magnitude > largest ? magnitude : largest;
    });
    write_sum(params.sums, blockIdx.x, sum);
    write_sum(params.sums, at<std::int64_t>(params.tiles)[params.row_count] + blockIdx.x, squares);
    count = reduce_block(count, [](std::int64_t a, std::int64_t b) { return a + b; });
    largest = reduce_block(largest, [](float a, float b) { return a > b ? a : b; });
    if (threadIdx.x != 0) return;
    atomicAdd(to<unsigned long long>(params.counts) + chunk.row, static_cast<unsigned long long>(count));
    atomicMax(to<std::uint32_t>(params.maxima) + chunk.row, static_cast<std::uint32_t>(bits_of(largest)));
}

// Join the sums of a row's blocks as a tree of neighbours, a block for each row and kind of sum.
KERNEL(256) join(const JoinParams __grid_constant__ params) {
    const auto* tiles = at<std::int64_t>(params.tiles);
    const std::int64_t kind = blockIdx.x < params.row_count ? 0 : 1;
    const std::int64_t row = blockIdx.x - kind * params.row_count;
    const std::int64_t begin = kind * tiles[params.row_count] + tiles[row];
    double* from = to<double>(params.sums) + begin;
    double* into = to<double>(params.workspace) + begin;
    std::int64_t count = tiles[row + 1] - tiles[row];
    while (count > 1) {
        const std::int64_t pairs = (count + 1) / 2;
        for (std::int64_t i = threadIdx.x; i < pairs; i += 256)
            into[i] = 2 * i + 1 < count ? from[2 * i] + from[2 * i + 1] : from[2 * i];
        __syncthreads();
        double* const joined = into;
        into = from;
        from = joined;
        count = pairs;
    }
    if (threadIdx.x == 0)
        to<double>(kind == 0 ? params.first : params.second)[row] = count == 0 ? 0.0 : from[0];
}
