// A layer as the matrix M (n x m, row-major) and its factors P (n x r) and Q (m x r), which lie column by
// column. Everything works on tiles of M that stay in the first-level cache: some rows of a range of columns.
#pragma once

#include "../kernels.hpp"

#include "decode.hpp"

namespace gradcomp::GRADCOMP_BODY {

// Rows, and factor columns, that are worked on at once, as far as there are registers for their products.
inline constexpr int row_group = register_count >= 32 ? 4 : register_count >= 8 ? 2 : 1;
inline constexpr int rank_group = register_count >= 32 ? 4 : register_count >= 8 ? 3 : 2;

inline constexpr std::int64_t tile_columns = 1024;
inline constexpr std::int64_t tile_elements = 8 * tile_columns;

// f<count>() for a count in 1..most.
template <int most, class Function>
inline void with_count(std::int64_t count, Function f) {
    if constexpr (most > 1) {
        if (count < most) return with_count<most - 1>(count, f);
    }
    f.template operator()<most>();
}

// Factors need not be aligned.
inline float value_at(const float* p) {
    float x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

inline void copy_floats(float* to, const float* from, std::int64_t count) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
}

inline void clear_floats(float* p, std::int64_t count) {
    std::memset(p, 0, static_cast<std::size_t>(count) * sizeof(float));
}

// A range of the columns of M.
struct Columns {
    std::int64_t begin, width;
};

// Call f for ranges of nearly equal width that cover all columns, of whole vectors but for the last.
template <class Function>
void for_columns(std::int64_t columns, std::int64_t most, Function f) {
    if (columns == 0) return;
    const std::int64_t ranges = (columns + most - 1) / most;
    const std::int64_t width = whole_vectors((columns + ranges - 1) / ranges);
    for (std::int64_t begin = 0; begin < columns; begin += width)
        f(Columns{begin, smaller(width, columns - begin)});
}

// Call f(first row, number of rows) for tiles of a range of columns. Rows that lie side by side in memory
// fill a tile.
template <class Function>
void for_tiles(const Matrix& matrix, const Columns& columns, Function f) {
    const bool whole_rows = columns.width == matrix.columns;
    const std::int64_t fitting = whole_rows ? tile_elements / columns.width / row_group : 1;
    const std::int64_t rows = (fitting > 1 ? fitting : 1) * row_group;
    for (std::int64_t row = 0; row < matrix.rows; row += rows) f(row, smaller(rows, matrix.rows - row));
}

// Call f(first element within the layer, place in the tile, elements) for the parts of a tile that are
// contiguous in both; rows follow each other without a gap in the tile.
template <class Function>
void for_runs(const Matrix& matrix, const Columns& columns, std::int64_t row, std::int64_t rows, Function f) {
    if (columns.width == matrix.columns)
        return f(row * matrix.columns, std::int64_t{0}, rows * columns.width);
    for (std::int64_t i = 0; i < rows; ++i)
        f((row + i) * matrix.columns + columns.begin, i * columns.width, columns.width);
}

// The columns of Q at a range of the columns of M, each with zeros up to whole vectors.
class PackedFactor {
  public:
    PackedFactor(const Matrix& matrix, const Columns& columns, const float* q, float* scratch)
        : values_(scratch), stride_(whole_vectors(columns.width)) {
        for (std::int64_t k = 0; k < matrix.rank; ++k) {
            copy_floats(values_ + k * stride_, q + k * matrix.columns + columns.begin, columns.width);
            clear_floats(values_ + k * stride_ + columns.width, stride_ - columns.width);
        }
    }

    const float* column(std::int64_t k) const { return values_ + k * stride_; }
    std::int64_t stride() const { return stride_; }

  private:
    float* values_;
    std::int64_t stride_;
};

// --- Q <- M^T P ---

// Q += x^T P for some rows x and some columns of P.
template <int rows, int ranks>
inline void add_rows(const float* const* pointers, std::int64_t width, const float* p, std::int64_t n,
                     float* q, std::int64_t stride) {
    // A copy, which nothing that is written to q could change.
    const float* x[rows];
    for (int i = 0; i < rows; ++i) x[i] = pointers[i];
    F32 factor[rows][ranks];
    for (int i = 0; i < rows; ++i)
        for (int k = 0; k < ranks; ++k) factor[i][k] = splat(value_at(p + k * n + i));
    for (std::int64_t b = 0; b < width; b += lanes) {
        F32 row[rows];
        for (int i = 0; i < rows; ++i) row[i] = load(x[i] + b);
        for (int k = 0; k < ranks; ++k) {
            F32 y = load(q + k * stride + b);
            for (int i = 0; i < rows; ++i) y = multiply_add(row[i], factor[i][k], y);
            store(q + k * stride + b, y);
        }
    }
}

inline void back_project_matrix(const Segment& segment, const Matrix& matrix, const float* p, float* q,
                                float* scratch) {
    const auto* const m = reinterpret_cast<const float*>(segment.next_residual);
    for_columns(matrix.columns, tile_columns, [&](const Columns& columns) {
        const std::int64_t stride = whole_vectors(columns.width);
        clear_floats(scratch, matrix.rank * stride);
        for (std::int64_t row = 0; row < matrix.rows;) {
            const std::int64_t group = matrix.rows - row < row_group ? 1 : row_group;
            // Whole vectors at the end of the last rows would be read from beyond M.
            alignas(64) float copies[row_group][tile_columns];
            const float* x[row_group];
            for (std::int64_t i = 0; i < group; ++i) {
                const std::int64_t first = (row + i) * matrix.columns + columns.begin;
                x[i] = m + first;
                if (first + stride > segment.length) {
                    copy_floats(copies[i], x[i], columns.width);
                    clear_floats(copies[i] + columns.width, stride - columns.width);
                    x[i] = copies[i];
                }
            }
            for (std::int64_t k = 0; k < matrix.rank; k += rank_group) {
                with_count<rank_group>(matrix.rank - k, [&]<int ranks>() {
                    const auto add = group == 1 ? add_rows<1, ranks> : add_rows<row_group, ranks>;
                    add(x, columns.width, p + k * matrix.rows + row, matrix.rows, scratch + k * stride,
                        stride);
                });
            }
            row += group;
        }
        for (std::int64_t k = 0; k < matrix.rank; ++k)
            copy_floats(q + k * matrix.columns + columns.begin, scratch + k * stride, columns.width);
    });
}

// --- P Q^T ---

// values[i][b] = ((p_i0 q_b0) + p_i1 q_b1) + ...: every body gives the same bytes.
template <int rows>
inline void multiply_rows(const Matrix& matrix, const float* p, const PackedFactor& q, std::int64_t width,
                          float* values) {
    // From the right to the left: what the last vector of a row writes into the next one is overwritten.
    for (std::int64_t b = whole_vectors(width) - lanes; b >= 0; b -= lanes) {
        F32 x[rows];
        const F32 first = load(q.column(0) + b);
        for (int i = 0; i < rows; ++i) x[i] = splat(value_at(p + i)) * first;
        for (std::int64_t k = 1; k < matrix.rank; ++k) {
            const F32 y = load(q.column(k) + b);
            for (int i = 0; i < rows; ++i) x[i] = x[i] + splat(value_at(p + k * matrix.rows + i)) * y;
        }
        for (int i = 0; i < rows; ++i) store(values + i * width + b, x[i]);
    }
}

// Call f(first element, values, count) for runs of P Q^T that cover the matrix. Up to a whole vector, values
// are followed by others of the matrix or zeros.
template <class Function>
void for_product(const Matrix& matrix, const float* p, const float* q, float* scratch, Function f) {
    alignas(64) float values[tile_elements + lanes];
    for_columns(matrix.columns, tile_columns, [&](const Columns& columns) {
        const PackedFactor factor(matrix, columns, q, scratch);
        for_tiles(matrix, columns, [&](std::int64_t row, std::int64_t rows) {
            if (matrix.rank == 0) clear_floats(values, rows * columns.width);
            for (std::int64_t i = 0; i < rows && matrix.rank > 0;) {
                const std::int64_t group = rows - i < row_group ? 1 : row_group;
                const auto multiply = group == 1 ? multiply_rows<1> : multiply_rows<row_group>;
                multiply(matrix, p + row + i, factor, columns.width, values + i * columns.width);
                i += group;
            }
            clear_floats(values + rows * columns.width, lanes);
            for_runs(matrix, columns, row, rows,
                     [&](std::int64_t first, std::int64_t at, std::int64_t count) {
                         f(first, values + at, count);
                     });
        });
    });
}

// output <- scale * ((P Q^T) / divisor); returns whether everything is finite there.
inline bool expand_matrix(const Segment& segment, const Matrix& matrix, const float* p, const float* q,
                          const Finish& finish, float* scratch) {
    const std::int64_t element_bytes = segment.dtype == Dtype::float32 ? 4 : 2;
    const bool streaming = segment.dtype == Dtype::float32 && segment.length >= streaming_length &&
                           segment.output % sizeof(float) == 0;
    const WriteValues write = choose_writer(segment.dtype, false, false);
    const WriteValues write_aligned = choose_writer(segment.dtype, false, streaming);
    std::int32_t largest = 0;
    const auto take = [&](std::int32_t found) { largest = found > largest ? found : largest; };
    for_product(matrix, p, q, scratch, [&](std::int64_t first, float* values, std::int64_t count) {
        auto* const out = reinterpret_cast<std::uint8_t*>(segment.output) + first * element_bytes;
        const auto unaligned = static_cast<std::int64_t>(
            streaming ? -reinterpret_cast<std::uintptr_t>(out) % 64 / sizeof(float) : 0);
        const std::int64_t head = smaller(unaligned, count);
        take(write(values, head, finish, out));
        take(write_aligned(values + head, count - head, finish, out + head * element_bytes));
    });
    return largest < overflow_bits(segment.dtype);
}

// next residual <- next residual - P Q^T
inline void subtract_matrix(const Segment& segment, const Matrix& matrix, const float* p, const float* q,
                            float* scratch) {
    for_product(matrix, p, q, scratch, [&](std::int64_t first, const float* values, std::int64_t count) {
        float* const next_residual = reinterpret_cast<float*>(segment.next_residual) + first;
        std::int64_t i = 0;
        for (; i + lanes <= count; i += lanes)
            store(next_residual + i, load(next_residual + i) - load(values + i));
        if (i < count) {
            alignas(64) float rest[lanes] = {};
            copy_floats(rest, next_residual + i, count - i);
            store(rest, load(rest) - load(values + i));
            copy_floats(next_residual + i, rest, count - i);
        }
    });
}

}  // namespace gradcomp::GRADCOMP_BODY
