// P <- M Q, while M, the contributions, is made and written to the next residual.
#pragma once

#include "lowrank.hpp"
#include "sources.hpp"

namespace gradcomp::GRADCOMP_BODY {

// Columns of Q for which the sums of one row of M fit in the registers.
inline constexpr int stream_ranks = register_count >= 32 ? 8 : 4;

// --- any matrix ---

// P += c Q for some rows c and some columns of Q. The last vector of a row reaches into the next one, but
// there Q is zero.
template <int rows, int ranks>
inline void add_products(const float* c, std::int64_t width, const float* q, std::int64_t stride, float* p,
                         std::int64_t n) {
    F32 sums[rows][ranks];
    for (int i = 0; i < rows; ++i)
        for (int k = 0; k < ranks; ++k) sums[i][k] = splat(0.0f);
    for (std::int64_t b = 0; b < width; b += lanes) {
        F32 x[rows];
        for (int i = 0; i < rows; ++i) x[i] = load(c + i * width + b);
        for (int k = 0; k < ranks; ++k) {
            const F32 y = load(q + k * stride + b);
            for (int i = 0; i < rows; ++i) sums[i][k] = multiply_add(x[i], y, sums[i][k]);
        }
    }
    for (int k = 0; k < ranks; ++k) {
        for (int i = 0; i < rows; ++i) {
            const float total = value_at(p + k * n + i) + reduce_add(sums[i][k]);
            std::memcpy(p + k * n + i, &total, sizeof total);
        }
    }
}

inline void project_tile(const Matrix& matrix, const float* c, std::int64_t width, std::int64_t rows,
                         const PackedFactor& q, float* p) {
    for (std::int64_t i = 0; i < rows;) {
        const std::int64_t group = rows - i < row_group ? 1 : row_group;
        for (std::int64_t k = 0; k < matrix.rank; k += rank_group) {
            with_count<rank_group>(matrix.rank - k, [&]<int ranks>() {
                const auto add = group == 1 ? add_products<1, ranks> : add_products<row_group, ranks>;
                add(c + i * width, width, q.column(k), q.stride(), p + k * matrix.rows + i, matrix.rows);
            });
        }
        i += group;
    }
}

// Contributions of a tile, which go to the next residual too; returns the bits of the largest magnitude.
inline I32 fill_tile(const Segment& segment, const Gradient& source, std::int64_t first, std::int64_t count,
                     float* c, I32 largest) {
    float* const next_residual = reinterpret_cast<float*>(segment.next_residual) + first;
    for (std::int64_t i = 0; i < count; i += block_size) {
        const std::int64_t part = smaller(block_size, count - i);
        const float* const x = source.block(first + i, part, c + i);
        if (x != c + i) copy_floats(c + i, x, part);
        copy_floats(next_residual + i, c + i, part);
        for (std::int64_t k = 0; k < part; k += lanes)
            largest = max(largest, magnitude_bits(load(c + i + k)));
    }
    // Finite numbers for the last row to reach into.
    clear_floats(c + count, lanes);
    return largest;
}

// Returns whether all contributions are finite.
inline bool project_tiles(const Segment& segment, const Matrix& matrix, const Gradient& source,
                          const float* q, float* p, float* scratch) {
    float* const c = scratch + matrix.rank * lowrank_columns;
    I32 largest = splat(0);
    clear_floats(p, matrix.rows * matrix.rank);
    for_columns(matrix.columns, lowrank_columns, [&](const Columns& columns) {
        const PackedFactor factor(matrix, columns, q, scratch);
        for_tiles(matrix, columns, [&](std::int64_t row, std::int64_t rows) {
            for_runs(matrix, columns, row, rows,
                     [&](std::int64_t first, std::int64_t at, std::int64_t count) {
                         largest = fill_tile(segment, source, first, count, c + at, largest);
                     });
            project_tile(matrix, c, columns.width, rows, factor, p + row);
        });
    });
    return reduce_max(largest) < float32_overflow;
}

// --- float32, few columns of Q ---

// One pass in the order of memory, as fast as a plain sum. Vectors are aligned in the next residual, so that
// rows begin and end within them; zeros around the columns of Q cut off what belongs to another row.
template <bool residual>
class ProjectStream {
  public:
    ProjectStream(const Segment& segment, float scale, float decay)
        : gradient_(reinterpret_cast<const float*>(segment.gradient)),
          residual_(reinterpret_cast<const float*>(segment.residual)),
          next_residual_(reinterpret_cast<float*>(segment.next_residual)),
          length_(segment.length),
          scale_(splat(scale)),
          decay_(splat(decay)),
          aligned_(segment.next_residual % sizeof(float) == 0),
          streaming_(aligned_ && length_ >= streaming_length) {}

    template <int ranks>
    bool run(const Matrix& matrix, const float* q, float* p, float* scratch) {
        const std::int64_t stride = lanes + whole_vectors(matrix.columns) + lanes;
        clear_floats(scratch, ranks * stride);
        for (int k = 0; k < ranks; ++k)
            copy_floats(scratch + k * stride + lanes, q + k * matrix.columns, matrix.columns);
        const auto unaligned = static_cast<std::int64_t>(
            aligned_ ? reinterpret_cast<std::uintptr_t>(next_residual_) % 64 / sizeof(float) : 0);
        I32 largest = splat(0);
        std::int64_t at = -unaligned;
        F32 c = next(at);
        largest = max(largest, magnitude_bits(c));
        std::int64_t begin = 0;
        for (std::int64_t row = 0; row < matrix.rows; ++row, begin += matrix.columns) {
            const std::int64_t last = begin + matrix.columns - lanes;
            F32 sums[ranks];
            for (int k = 0; k < ranks; ++k) sums[k] = splat(0.0f);
            const auto add = [&] {
                const float* const factor = scratch + lanes + (at - begin);
                for (int k = 0; k < ranks; ++k) sums[k] = multiply_add(c, load(factor + k * stride), sums[k]);
            };
            add();
            while (at <= last) {
                at += lanes;
                c = next(at);
                largest = max(largest, magnitude_bits(c));
                add();
            }
            for (int k = 0; k < ranks; ++k) {
                const float total = reduce_add(sums[k]);
                std::memcpy(p + k * matrix.rows + row, &total, sizeof total);
            }
        }
        return reduce_max(largest) < float32_overflow;
    }

  private:
    // The contributions at..at+lanes, zero where there are none, also written to the next residual.
    F32 next(std::int64_t at) const {
        if (at < 0 || at + lanes > length_) return part(at);
        F32 c = scale_ * load(gradient_ + at);
        if constexpr (residual) c = c + decay_ * load(residual_ + at);
        if (streaming_)
            stream(next_residual_ + at, c);
        else
            store(next_residual_ + at, c);
        return c;
    }

    F32 part(std::int64_t at) const {
        const std::int64_t skipped = at < 0 ? -at : 0;
        const std::int64_t count = smaller(lanes, length_ - at) - skipped;
        alignas(64) float c[lanes] = {};
        alignas(64) float r[lanes] = {};
        copy_floats(c + skipped, gradient_ + at + skipped, count);
        if constexpr (residual) copy_floats(r + skipped, residual_ + at + skipped, count);
        F32 sum = scale_ * load(c);
        if constexpr (residual) sum = sum + decay_ * load(r);
        store(c, sum);
        copy_floats(next_residual_ + at + skipped, c + skipped, count);
        return sum;
    }

    const float* gradient_;
    const float* residual_;
    float* next_residual_;
    std::int64_t length_;
    F32 scale_, decay_;
    bool aligned_, streaming_;
};

// Returns whether all contributions are finite.
inline bool project_matrix(const Segment& segment, const Matrix& matrix, float scale, float decay,
                           const float* q, float* p, float* scratch) {
    const bool streams = segment.dtype == Dtype::float32 && segment.gradient != 0 && matrix.rank > 0 &&
                         matrix.rank <= stream_ranks && matrix.columns >= lanes &&
                         matrix.columns <= lowrank_columns;
    if (!streams) return project_tiles(segment, matrix, Gradient(segment, scale, decay), q, p, scratch);
    bool finite = true;
    with_count<stream_ranks>(matrix.rank, [&]<int ranks>() {
        finite = segment.residual != 0
                     ? ProjectStream<true>(segment, scale, decay).template run<ranks>(matrix, q, p, scratch)
                     : ProjectStream<false>(segment, scale, decay).template run<ranks>(matrix, q, p, scratch);
    });
    return finite;
}

}  // namespace gradcomp::GRADCOMP_BODY
