// Sparse selections of whole layers; gradcomp/kernels/reference_selection.py defines what each kernel
// computes. One call serves a whole table. The selection of a row lies at offsets[row] of the flat arrays of
// the call.
#pragma once

#include <cstdint>

#include "segment.hpp"

namespace gradcomp {

inline constexpr std::int64_t max_layer_elements = (std::int64_t{1} << 32) - 1;

// Memory for the candidates of one row at a time: what cannot be excluded while the row is read.
struct CandidateSpace {
    std::uint32_t* indices;
    std::uint32_t* bits;  // of the float32
};

struct ContributeCall {
    SegmentTable table;
    std::uint8_t* flags;
    const float* factors;
    double decay;
};

struct SquaresCall {
    SegmentTable table;
    double* out;
};

struct SelectTopCall {
    SegmentTable table;
    std::uint8_t* flags;
    const float* factors;
    const std::int64_t* counts;
    const std::int64_t* offsets;
    std::uint32_t* indices;
    float* values;
    std::int64_t* found;
    double decay;
    bool zeros;
    CandidateSpace space;
};

struct SelectAboveCall {
    SegmentTable table;
    const float* thresholds;
    const std::int64_t* limits;
    const std::int64_t* offsets;
    std::uint32_t* indices;
    float* values;
    std::int64_t* found;
    CandidateSpace space;
};

struct TailCall {
    SegmentTable table;
    const float* thresholds;
    std::int64_t* counts;
    double* sums;
    double* squares;
    float* maxima;
};

struct SampleCall {
    SegmentTable table;
    const std::int64_t* counts;
    float* thresholds;
    std::int64_t stride;
    std::int64_t phase;
    std::uint32_t* space;  // for sample_capacity magnitudes
};

struct TakeCall {
    SegmentTable table;
    const std::int64_t* offsets;
    const std::int64_t* counts;
    const std::uint32_t* indices;
    float* values;
};

struct PutCall {
    SegmentTable table;
    const std::int64_t* offsets;
    const std::int64_t* counts;
    const std::uint32_t* indices;
    const float* values;
};

void sample_thresholds(const SampleCall& call);
void take(const TakeCall& call);
void put(const PutCall& call);

// The rank-th largest magnitude.
struct RankedMagnitude {
    std::uint32_t magnitude;  // bits of |x|
    std::int64_t ties;        // how many elements of this magnitude are among the `rank` largest
};

// Of float32 numbers given by their bits, signs ignored; 1 <= rank <= count.
RankedMagnitude ranked_magnitude(const std::uint32_t* bits, std::int64_t count, std::int64_t rank);

// Above so many candidates a row's list is cut down to the `count` best.
std::int64_t candidate_limit(std::int64_t length, std::int64_t count);

// Vectors of sixteen elements that select_top reads to exclude most others: a sixteenth of a row, at most
// 2**16 elements.
std::int64_t sampled_vectors(std::int64_t length);

// Items of a CandidateSpace for the rows of a table.
std::int64_t candidate_capacity(const SegmentTable& table, const std::int64_t* counts);

// Sampled elements of a row, and the most of a table.
std::int64_t sample_size(std::int64_t length, std::int64_t stride, std::int64_t phase);
std::int64_t sample_capacity(const SegmentTable& table, std::int64_t stride, std::int64_t phase);

// Each throws std::invalid_argument, naming the row.
void check_layers(const SegmentTable& table);
void check_narrow(const SegmentTable& table);
void check_next_residuals(const SegmentTable& table);
void check_counts(const SegmentTable& table, const std::int64_t* counts);
void check_places(const SegmentTable& table, const std::int64_t* offsets, const std::int64_t* counts,
                  std::int64_t capacity);
void check_indices(const SegmentTable& table, const std::int64_t* offsets, const std::int64_t* counts,
                   const std::uint32_t* indices);

}  // namespace gradcomp
