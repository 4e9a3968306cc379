// The kernels: one call serves a whole table. gradcomp/kernels/reference.py defines what each computes.
//
// Callers check the table first; a kernel trusts its rows, and nothing it reads from a payload. Rows do not
// share memory that is written.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "lowrank.hpp"
#include "program.hpp"
#include "segment.hpp"
#include "select.hpp"

namespace gradcomp {

// A run of elements of one row of a table, and whether a kernel found something there that is not finite.
struct Part {
    std::int64_t row, first, length;
    bool failed;
};

struct Rounding {
    bool stochastic;
    std::uint64_t seed;
    std::uint32_t step;
    std::uint32_t rank;
};

struct EncodeCall {
    Codec codec;
    SegmentTable table;
    std::uint8_t* payload;
    std::uint8_t* flags;
    Rounding rounding;
    double scale;
    double decay;
    const float* magnitudes;  // of a codebook, else null
};

struct DecodeCall {
    Codec codec;
    SegmentTable table;
    const std::uint8_t* payload;
    std::uint8_t* flags;
    double divisor;
    double scale;
    const float* magnitudes;  // of a codebook, else null
};

struct DecodeAddCall {
    Codec codec;
    SegmentTable table;
    const std::uint8_t* payload;
    double scale;
    const float* magnitudes;  // of a codebook, else null
};

struct ReduceCall {
    Codec codec;
    SegmentTable table;
    std::span<const std::uint8_t* const> payloads;
    std::uint8_t* out;
    std::uint8_t* flags;
    Rounding rounding;
    double divisor;
    double decay;
    const float* magnitudes;  // of a codebook, else null
};

// Lists of all ranks: those of a rank side by side, in the order of the rows.
struct ScatterCall {
    SegmentTable table;
    std::uint8_t* flags;
    std::int64_t ranks;
    const std::int64_t* offsets;
    const std::int64_t* counts;
    const std::uint32_t* indices;
    const float* values;
    double divisor;
    double scale;
};

// Items begin..end of the lists.
struct ListPart {
    std::int64_t begin, end;
};

struct ProjectCall {
    LowRankLayers layers;
    std::uint8_t* flags;
    const float* factors;  // one per row
    const float* q;
    float* p;
    double decay;
};

struct BackProjectCall {
    LowRankLayers layers;
    const float* p;
    float* q;
};

struct OrthogonaliseCall {
    std::int64_t layers;
    const std::int64_t* rows;
    const std::int64_t* ranks;
    float* p;
    const std::int64_t* p_at;
};

struct ExpandCall {
    LowRankLayers layers;
    std::uint8_t* flags;
    const float* p;
    const float* q;
    double divisor;
    double scale;
};

struct SubtractCall {
    LowRankLayers layers;
    const float* p;
    const float* q;
};

// Columns with an item per row; layers are hashes.
struct DrawIndicesCall {
    std::int64_t rows;
    const std::int64_t* lengths;
    const std::int64_t* counts;
    const std::uint32_t* layers;
    const std::int64_t* offsets;
    std::uint32_t* indices;
    Rounding rounding;
};

// The same sources, compiled for one instruction set. The first four handle parts of a call, of which several
// threads handle some each: see parts.hpp.
struct Kernels {
    std::string_view isa;
    void (*encode)(const EncodeCall&, std::span<Part>);
    void (*decode)(const DecodeCall&, std::span<Part>);
    void (*decode_add)(const DecodeAddCall&, std::span<Part>);
    void (*reduce)(const ReduceCall&, std::span<Part>);
    void (*scatter_mean)(const ScatterCall&, ListPart*);  // room for one part per rank
    void (*contribute)(const ContributeCall&);
    void (*squares)(const SquaresCall&);
    void (*select_top)(const SelectTopCall&);
    void (*select_above)(const SelectAboveCall&);
    void (*tail)(const TailCall&);
    void (*project)(const ProjectCall&);
    void (*back_project)(const BackProjectCall&);
    void (*orthogonalise)(const OrthogonaliseCall&);
    void (*expand)(const ExpandCall&);
    void (*subtract)(const SubtractCall&);
    void (*draw_indices)(const DrawIndicesCall&);
    void (*relax)(const RelaxCall&);
};

// What this build has and this CPU can run, fastest first; never empty.
const std::vector<Kernels>& available_kernels();

// The body in use: the fastest, unless another was selected.
const Kernels& active_kernels();

// Throw std::invalid_argument if there is no such body.
void select_kernels(std::string_view isa);

bool any_nonzero(const Segment& segment);

// What every row uses of its room, to `out`, one behind the other, and back to the rooms; they return the
// bytes of that. They throw std::invalid_argument for a row that is not what it says of itself.
std::int64_t compact(Codec codec, const SegmentTable& table, const std::uint8_t* payload, std::uint8_t* out);
std::int64_t restore(Codec codec, const SegmentTable& table, const std::uint8_t* source, std::int64_t there,
                     std::uint8_t* payload);

// Throw std::invalid_argument, naming the row, unless all numbers are in range and every row lies inside an
// array of so many indices.
void check_draws(const DrawIndicesCall& call, std::int64_t indices);

// Throw std::invalid_argument, naming the row, unless it is well formed and its lists lie inside `capacity`
// items.
void check_scatter_row(std::int64_t row, const Segment& segment, const ScatterCall& call,
                       std::int64_t capacity);

// Throw std::invalid_argument, naming the row and writing nothing, for indices out of range or order.
void scatter_mean(const ScatterCall& call);

}  // namespace gradcomp
