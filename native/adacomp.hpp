// AdaComp's selection; gradcomp/kernels/reference_selection.py defines what it computes.
#pragma once

#include <cstdint>

#include "segment.hpp"

namespace gradcomp {

struct AdacompCall {
    SegmentTable table;
    const float* factors;
    const std::int64_t* limits;
    const std::int64_t* offsets;
    std::uint32_t* indices;
    float* values;
    std::int64_t* found;
    std::int64_t bin_size;
};

void select_adacomp(const AdacompCall& call);

}  // namespace gradcomp
