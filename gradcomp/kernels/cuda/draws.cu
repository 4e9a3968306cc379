// Random indices, see gradcomp/kernels/philox.py. A thread draws as many as a counter has words.

#include "philox.cuh"

using namespace gradcomp;
using namespace gradcomp::cuda;

struct Drawn {
    std::uint64_t count, offset, layer;
    std::uint64_t quotient, remainder;  // of the length by the count
};

struct DrawParams {
    std::uint64_t rows, tiles;
    std::int64_t row_count;
    std::uint64_t indices;
    std::uint64_t seed;
    std::int64_t step, rank;
};

KERNEL(256) draw_indices(const DrawParams __grid_constant__ params) {
    const auto* tiles = at<std::int64_t>(params.tiles);
    const std::int64_t row = row_of(tiles, params.row_count, blockIdx.x);
    const Drawn drawn = at<Drawn>(params.rows)[row];
    const auto block = static_cast<std::uint64_t>((blockIdx.x - tiles[row]) * 256 + threadIdx.x);
    const std::uint64_t begin = 4 * block;
    if (begin >= drawn.count) return;
    std::uint32_t words[4];
    const Stream stream{params.seed, static_cast<std::uint32_t>(params.step),
                        static_cast<std::uint32_t>(params.rank)};
    Counters(stream, static_cast<std::uint32_t>(drawn.layer)).words(static_cast<std::uint32_t>(block), words);
    // Stratum j begins at floor(j n / k) = j quotient + floor(j remainder / k).
    const std::uint64_t extra = begin * drawn.remainder;
    std::uint64_t first = begin * drawn.quotient + extra / drawn.count, over = extra % drawn.count;
    auto* const indices = to<std::uint32_t>(params.indices) + drawn.offset;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (begin + static_cast<std::uint64_t>(i) >= drawn.count) return;
        over += drawn.remainder;
        const bool carried = over >= drawn.count;
        const std::uint64_t size = drawn.quotient + (carried ? 1 : 0);
        over -= carried ? drawn.count : 0;
        indices[begin + i] = static_cast<std::uint32_t>(first + (words[i] * size >> 32));
        first += size;
    }
}
