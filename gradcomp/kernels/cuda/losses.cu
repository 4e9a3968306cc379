// What a codec, GRADCOMP_CLASS, loses at many levels, from one read of the values. A block leaves partial
// sums, which the host adds up in order.

#include "native/body/block_float.hpp"
#include "native/body/casts.hpp"
#include "native/body/codebook.hpp"
#include "native/body/signs.hpp"

#include "philox.cuh"
#include "sources.cuh"

using namespace gradcomp;
using namespace gradcomp::cuda;

namespace gradcomp::cuda {

using Class = GRADCOMP_CLASS;

struct LossParams {
    std::uint64_t rows, tiles;
    std::int64_t row_count;
    std::uint64_t bits;  // of each level, ascending or not
    std::int64_t levels;
    std::uint64_t partial;  // tiles x levels doubles
    std::uint64_t magnitudes;
    std::uint64_t largest;  // magnitude of each row's values, where scales have a unit
    std::uint64_t seed;
    std::int64_t step, rank;
    double scale, decay;  // what a source of contributions wants
};

// Levels that a block adds up side by side.
inline constexpr int most_levels = 32;

inline double sum_of_team(double x) {
    return reduce_team(x, [](double a, double b) { return a + b; });
}

// One team per bucket, whose values stay in registers while level after level is tried; larger ones in cache.
template <bool stochastic>
inline void find_losses(const LossParams& params) {
    __shared__ double lost[16][most_levels];
    const auto* tiles = at<std::int64_t>(params.tiles);
    const std::int64_t row = row_of(tiles, params.row_count, blockIdx.x);
    Segment segment = at<Segment>(params.rows)[row];
    const Payload<Class> layout(segment);
    const std::int64_t bucket = (blockIdx.x - tiles[row]) * 16 + threadIdx.x / 16;
    const auto begin_of = [&](std::int64_t number) {
        return smaller(number * layout.bucket_size, segment.length);
    };
    const std::int64_t begin = begin_of(bucket), end = begin_of(bucket + 1);
    const std::int64_t most = begin_of(bucket / 2 * 2 + 1) - begin_of(bucket / 2 * 2);
    const FromGradient source(params, segment);
    const Stream stream{params.seed, static_cast<std::uint32_t>(params.step),
                        static_cast<std::uint32_t>(params.rank)};

    constexpr int kept = 4;
    const std::int64_t origin = begin / 8 * 8 + 8 * team_rank();
    float c[kept][8];
    typename Class::Range range;
    add_elements(range, source, bucket, begin, end - begin, most);
#pragma unroll
    for (int k = 0; k < kept; ++k) {
        const std::int64_t first = origin + 8 * 16 * k;
        if (first < end) source.read(first, smaller(group, segment.length - first), c[k]);
    }
    const bool small = end - begin <= (kept - 1) * 8 * 16;

    for (int level = 0; level < params.levels; ++level) {
        segment.bits = at<std::int32_t>(params.bits)[level];
        Level of_row =
            level_of<Class>(segment, at<float>(params.magnitudes), at<float>(params.largest) + row);
        if constexpr (shifts<Class>) of_row.shift = shift_of(stream, segment.layer);
        const Class codec(range, of_row, end > begin ? end - begin : 1);
        double sum = 0.0;
        const auto add = [&](const float (&x)[8], std::int64_t first) {
            float u[8] = {};
            if constexpr (stochastic) draw(Counters(stream, segment.layer), segment.start + first, u);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (first + i < begin || first + i >= end) continue;
                const float each =
                    (F32{x[i]} - codec.value(codec.template code<stochastic>({x[i]}, {u[i]}))).v;
                sum += static_cast<double>(each) * static_cast<double>(each);
            }
        };
        if (small) {
#pragma unroll
            for (int k = 0; k < kept; ++k)
                if (origin + 8 * 16 * k < end) add(c[k], origin + 8 * 16 * k);
        } else {
            for (std::int64_t first = origin; first < end; first += 8 * 16) {
                float x[8];
                source.read(first, smaller(group, segment.length - first), x);
                add(x, first);
            }
        }
        if (begin < end && !codec.representable()) sum = static_cast<double>(__builtin_inff());
        sum = sum_of_team(sum);
        if (threadIdx.x % 16 == 0) lost[threadIdx.x / 16][level] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= params.levels) return;
    double sum = 0.0;
    for (int team = 0; team < 16; ++team) sum += lost[team][threadIdx.x];
    to<double>(params.partial)[blockIdx.x * params.levels + threadIdx.x] = sum;
}

}  // namespace gradcomp::cuda

#define LOSSES_NEAREST 1
#define LOSSES_STOCHASTIC 2

#if IN_MODULE(LOSSES_NEAREST)
KERNEL(256) losses_nearest(const LossParams __grid_constant__ params) {
    find_losses<false>(params);
}
#endif

#if IN_MODULE(LOSSES_STOCHASTIC)
KERNEL(256) losses_stochastic(const LossParams __grid_constant__ params) {
    find_losses<Class::draws>(params);
}
#endif
