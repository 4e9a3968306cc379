// The dynamic program that chooses a level for every layer; gradcomp/kernels/reference_program.py defines
// what it computes.
#pragma once

#include <cstdint>

namespace gradcomp {

// Choices of a layer that two bytes can number.
inline constexpr std::int64_t max_choices = 1 << 16;

// Steps, beyond the least possible, that a row of the program has room for.
inline constexpr std::int64_t max_reach = 1 << 24;

// One row per layer, one column per choice.
struct CheapestCall {
    std::int64_t layers;
    std::int64_t choices;
    const std::int32_t* steps;
    const double* costs;
    std::int64_t budget;
    std::int32_t* chosen;  // one per layer; written if something was found
    bool* found;
};

// Cells of infinite cost on either side of a row; behind a row that is written, room for whole vectors.
inline constexpr std::int64_t row_margin = 32;

// One layer: after[e] = the least of before[e - steps[c]] + costs[c], of equals that with the least c.
struct RelaxCall {
    const double* before;
    std::int64_t before_cells;
    double* after;
    std::int64_t after_cells;
    const std::int32_t* steps;  // ascending
    const double* costs;
    std::int64_t choices;
    void* taken;  // c for each cell, in a byte or two; has a margin behind it too
    bool wide;
};

// Throws std::invalid_argument, naming the layer if it is one, for numbers that are out of range; reads each
// number once.
void cheapest(const CheapestCall& call);

}  // namespace gradcomp
