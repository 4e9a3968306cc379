// A row of the dynamic program: doubles in vectors of the compiler's own extension (GCC, Clang), as long as
// the instruction set has them.
#pragma once

#include <cstdint>
#include <cstring>

#include "../program.hpp"

namespace gradcomp::GRADCOMP_BODY {

#if defined(GRADCOMP_AVX512)
inline constexpr std::int64_t doubles = 8;
#elif defined(GRADCOMP_AVX2)
inline constexpr std::int64_t doubles = 4;
#else
inline constexpr std::int64_t doubles = 2;
#endif

using F64 = double __attribute__((vector_size(8 * doubles)));
using I64 = std::int64_t __attribute__((vector_size(8 * doubles)));

// Vectors of cells that stay in registers while all choices pass by.
inline constexpr int cell_vectors = 4;
inline constexpr std::int64_t cells_at_once = cell_vectors * doubles;
static_assert(cells_at_once <= row_margin);

template <class Number>
inline void relax_row(const RelaxCall& call, Number* taken) {
    const std::int32_t* const steps = call.steps;
    // The choices within reach of some of the cells.
    std::int64_t begin = 0, end = 0;
    for (std::int64_t cell = 0; cell < call.after_cells; cell += cells_at_once) {
        while (end < call.choices && steps[end] < cell + cells_at_once) ++end;
        while (begin < end && steps[begin] + call.before_cells <= cell) ++begin;
        F64 best[cell_vectors];
        I64 number[cell_vectors];
        for (int k = 0; k < cell_vectors; ++k) {
            best[k] = F64{} + __builtin_inf();
            number[k] = I64{};
        }
        for (std::int64_t c = begin; c < end; ++c) {
            const double* const from = call.before + (cell - steps[c]);
            const double cost = call.costs[c];
            for (int k = 0; k < cell_vectors; ++k) {
                F64 total;
                std::memcpy(&total, from + k * doubles, sizeof total);
                total += cost;
                const I64 less = total < best[k];
                best[k] = less ? total : best[k];
                number[k] = less ? I64{} + c : number[k];
            }
        }
        std::memcpy(call.after + cell, best, sizeof best);
        std::int64_t numbers[cells_at_once];
        std::memcpy(numbers, number, sizeof numbers);
        for (std::int64_t i = 0; i < cells_at_once; ++i) taken[cell + i] = static_cast<Number>(numbers[i]);
    }
}

inline void relax(const RelaxCall& call) {
    if (call.wide)
        relax_row(call, static_cast<std::uint16_t*>(call.taken));
    else
        relax_row(call, static_cast<std::uint8_t*>(call.taken));
}

}  // namespace gradcomp::GRADCOMP_BODY
