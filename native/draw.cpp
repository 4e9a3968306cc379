// What a caller may ask of the drawing of indices.

#include <stdexcept>
#include <string>

#include "kernels.hpp"

namespace gradcomp {

namespace {

// What 32-bit words of randomness can tell apart.
constexpr std::int64_t max_length = 0xFFFFFFFF;

void require(bool condition, std::int64_t row, const char* complaint) {
    if (!condition) throw std::invalid_argument("row " + std::to_string(row) + ": " + complaint);
}

}  // namespace

void check_draws(const DrawIndicesCall& call, std::int64_t indices) {
    for (std::int64_t row = 0; row < call.rows; ++row) {
        const std::int64_t length = call.lengths[row], count = call.counts[row], offset = call.offsets[row];
        require(length >= 0 && length <= max_length, row, "length is not in 0..4294967295");
        require(count >= 0 && count <= length, row, "count is not in 0..length");
        // A difference: the sum of a hostile offset and a count could wrap.
        require(offset >= 0 && offset <= indices - count, row, "the indices do not lie inside the array");
    }
}

}  // namespace gradcomp
