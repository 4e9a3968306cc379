// Which elements AdaComp selects: the maxima of all bins, then a bit per element.

#include "block.cuh"

using namespace gradcomp;
using namespace gradcomp::cuda;

namespace gradcomp::cuda {

inline constexpr std::int64_t tile_elements = 8 * 256;

struct AdacompParams {
    std::uint64_t rows, tiles;
    std::int64_t row_count;
    std::uint64_t factors;  // of gradients
    std::int64_t bin_size;
    std::uint64_t bin_begins;   // number of each row's first bin
    std::uint64_t maxima;       // bits of the largest magnitude of each bin, zero at first
    std::uint64_t mark_begins;  // of each row's, in bytes
    std::uint64_t marks;        // written
};

// A thread's eight elements.
struct Eight {
    Segment segment;
    std::int64_t row, begin, first, count;

    explicit Eight(const AdacompParams& params) {
        const auto* tiles = at<std::int64_t>(params.tiles);
        row = row_of(tiles, params.row_count, blockIdx.x);
        segment = at<Segment>(params.rows)[row];
        begin = (blockIdx.x - tiles[row]) * tile_elements;
        first = begin + 8 * threadIdx.x;
        count = smaller(group, segment.length - first);
    }
};

// Of numbers below 2**32, as those of elements are; a division of wider ones takes far longer.
inline std::int64_t quotient(std::int64_t a, std::int64_t b) {
    return static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b);
}

inline std::int32_t largest_of_warp(std::int32_t x) {
    for (int distance = 16; distance > 0; distance /= 2) {
        const std::int32_t other = __shfl_xor_sync(whole_warp, x, distance);
        x = other > x ? other : x;
    }
    return x;
}

}  // namespace gradcomp::cuda

KERNEL(256) maxima(const AdacompParams __grid_constant__ params) {
    __shared__ std::int32_t largest[tile_elements];  // of the bins that lie in the tile, or partly
    const Eight own(params);
    const std::int64_t size = params.bin_size;
    const std::int64_t end = smaller(own.begin + tile_elements, own.segment.length);
    const std::int64_t first_bin = own.begin / size, bins = (end - 1) / size - first_bin + 1;
    for (std::int64_t bin = threadIdx.x; bin < bins; bin += 256) largest[bin] = 0;
    __syncthreads();

    float c[8] = {};
    if (own.count > 0) read_floats(at<float>(own.segment.next_residual) + own.first, own.count, c);
    std::int32_t bits[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        bits[i] = i < own.count ? bits_of(c[i]) & 0x7FFFFFFF : 0;
        if (bits[i] > 0x7F800000) bits[i] = 0;  // NaN
    }
    if (bins == 1) {
        std::int32_t x = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) x = bits[i] > x ? bits[i] : x;
        x = largest_of_warp(x);
        if (threadIdx.x % 32 == 0) atomicMax(largest, x);
    } else if (own.count > 0) {
        std::int64_t bin = quotient(own.first, size), next = (bin + 1) * size;
        std::int32_t x = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i < own.count && own.first + i == next) {
                atomicMax(largest + (bin - first_bin), x);
                ++bin;
                next += size;
                x = 0;
            }
            x = bits[i] > x ? bits[i] : x;
        }
        atomicMax(largest + (bin - first_bin), x);
    }
    __syncthreads();
    auto* const all =
        to<std::int32_t>(params.maxima) + at<std::int64_t>(params.bin_begins)[own.row] + first_bin;
    for (std::int64_t bin = threadIdx.x; bin < bins; bin += 256) {
        const bool shared = bin == 0 || bin == bins - 1;  // with another tile
        if (shared)
            atomicMax(all + bin, largest[bin]);
        else
            all[bin] = largest[bin];
    }
}

KERNEL(256) mark(const AdacompParams __grid_constant__ params) {
    const Eight own(params);
    if (own.count <= 0) return;
    const float factor = at<float>(params.factors)[own.row];
    float c[8] = {}, g[8];
    read_floats(at<float>(own.segment.next_residual) + own.first, own.count, c);
    read_gradient(own.segment, own.first, own.count, g);
    const auto* const all = at<std::int32_t>(params.maxima) + at<std::int64_t>(params.bin_begins)[own.row];
    std::int64_t bin = quotient(own.first, params.bin_size), next = (bin + 1) * params.bin_size;
    float largest = float_of(all[bin]);
    std::uint32_t marked = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (i >= own.count) continue;
        if (own.first + i == next) {
            ++bin;
            next += params.bin_size;
            largest = float_of(all[bin]);
        }
        const float step = factor * g[i];
        const float ahead = float_of(bits_of(c[i] + step) & 0x7FFFFFFF);
        if (largest > 0.0f && ahead >= largest) marked |= 1U << i;
    }
    to<std::uint8_t>(params.marks)[at<std::int64_t>(params.mark_begins)[own.row] + own.first / 8] =
        static_cast<std::uint8_t>(marked);
}
