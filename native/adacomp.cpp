// AdaComp's selection. It reads two arrays and keeps few elements: memory, not arithmetic, is what it costs.

#include "adacomp.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

namespace gradcomp {

namespace {

template <class Item>
Item load(std::uint64_t address, std::int64_t i) {
    Item item;
    std::memcpy(&item, reinterpret_cast<const std::uint8_t*>(address) + i * std::int64_t{sizeof item},
                sizeof item);
    return item;
}

float from_half(std::uint32_t half) {
    const std::uint32_t sign = (half & 0x8000U) << 16;
    const std::uint32_t magnitude = half & 0x7FFFU;
    if (magnitude >= 0x7C00) return std::bit_cast<float>(sign | 0x7F800000U | (magnitude & 0x3FFU) << 13);
    // Exact, subnormal numbers too: the exponents differ by 112.
    const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(scaled));
}

float gradient(const Segment& segment, std::int64_t i) {
    if (segment.gradient == 0) return 0.0f;
    switch (segment.dtype) {
        case Dtype::float16:
            return from_half(load<std::uint16_t>(segment.gradient, i));
        case Dtype::bfloat16:
            return std::bit_cast<float>(std::uint32_t{load<std::uint16_t>(segment.gradient, i)} << 16);
        default:
            return load<float>(segment.gradient, i);
    }
}

float magnitude(const Segment& segment, std::int64_t i) {
    return std::fabs(load<float>(segment.next_residual, i));
}

void find_candidates(const Segment& segment, float factor, std::int64_t bin_size,
                     std::vector<std::uint32_t>& candidates) {
    for (std::int64_t begin = 0; begin < segment.length;) {
        const std::int64_t end = begin + std::min(bin_size, segment.length - begin);
        float largest = 0.0f;
        for (std::int64_t i = begin; i < end; ++i) largest = std::max(largest, magnitude(segment, i));
        for (std::int64_t i = begin; i < end && largest > 0.0f; ++i) {
            const float step = factor * gradient(segment, i);
            if (std::fabs(load<float>(segment.next_residual, i) + step) >= largest)
                candidates.push_back(static_cast<std::uint32_t>(i));
        }
        begin = end;
    }
}

// Of the candidates the `limit` largest, ties to the lower index; candidates ascend before and after.
void keep_largest(const Segment& segment, std::int64_t limit, std::vector<std::uint32_t>& candidates) {
    const auto kept = candidates.begin() + limit;
    std::nth_element(candidates.begin(), kept, candidates.end(), [&](std::uint32_t a, std::uint32_t b) {
        const float x = magnitude(segment, a), y = magnitude(segment, b);
        return x != y ? x > y : a < b;
    });
    candidates.erase(kept, candidates.end());
    std::sort(candidates.begin(), candidates.end());
}

}  // namespace

void select_adacomp(const AdacompCall& call) {
    std::vector<std::uint32_t> candidates;
    for (std::int64_t row = 0; row < call.table.size(); ++row) {
        const Segment segment = call.table[row];
        candidates.clear();
        find_candidates(segment, call.factors[row], call.bin_size, candidates);
        if (std::cmp_greater(candidates.size(), call.limits[row]))
            keep_largest(segment, call.limits[row], candidates);
        std::copy(candidates.begin(), candidates.end(), call.indices + call.offsets[row]);
        std::transform(candidates.begin(), candidates.end(), call.values + call.offsets[row],
                       [&](std::uint32_t i) { return load<float>(segment.next_residual, i); });
        call.found[row] = static_cast<std::int64_t>(candidates.size());
    }
}

}  // namespace gradcomp
