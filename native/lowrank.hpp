// Layers as matrices with low-rank factors; gradcomp/kernels/reference_lowrank.py describes both.
#pragma once

#include <cstdint>

#include "segment.hpp"

namespace gradcomp {

// M is rows x columns, P is rows x rank and Q is columns x rank.
struct Matrix {
    std::int64_t rows, columns, rank;
};

struct LowRankLayers {
    SegmentTable table;
    const std::int64_t* rows;
    const std::int64_t* columns;
    const std::int64_t* ranks;
    const std::int64_t* p_at;  // where the factors begin, in elements of the arrays of all P and of all Q
    const std::int64_t* q_at;
    float* scratch;  // of lowrank_workspace

    Matrix matrix(std::int64_t row) const;
};

// Columns of a matrix that a kernel works on at once; a multiple of the vectors' length.
inline constexpr std::int64_t lowrank_columns = 8192;

// Floats of scratch memory for factors of at most that rank.
std::int64_t lowrank_workspace(std::int64_t rank);

// Throw std::invalid_argument, naming the row, unless `count` columns of `length` elements at `at` lie inside
// an array of that size.
void check_factor(std::int64_t row, const char* name, std::int64_t at, std::int64_t length,
                  std::int64_t count, std::int64_t size);

// Throw std::invalid_argument, naming the row, unless all rows, or with `outputs` those that have one, are
// well formed, have a next residual, or an output, and factors inside arrays of these sizes. Returns the
// largest rank.
std::int64_t check_low_rank(const LowRankLayers& layers, std::int64_t p_size, std::int64_t q_size,
                            bool outputs);

}  // namespace gradcomp
