// The parts of selections that need no vectors: ranks among candidates, gathering, scattering, and checks.

#include "select.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>

namespace gradcomp {

namespace {

constexpr std::uint32_t magnitude_mask = 0x7FFFFFFF;
constexpr std::uint32_t infinity_bits = 0x7F800000;

// One digit of a radix selection, the most significant first: of the numbers that begin with `prefix`, count
// the values of the next `width` bits, find the one that holds the rank, and append it.
class DigitSearch {
  public:
    explicit DigitSearch(std::int64_t rank) : rank_(rank) {}

    template <int shift, int width>
    void refine(const std::uint32_t* bits, std::int64_t count) {
        constexpr std::uint32_t digits = 1U << width;
        // Equal digits follow each other often, and an increment has to wait for the one before it.
        static_assert(digits <= sizeof counts_[0] / sizeof counts_[0][0]);
        for (auto& counts : counts_) std::fill_n(counts, digits, 0U);
        const auto add = [&](std::uint32_t* counts, std::uint32_t x) {
            const std::uint32_t magnitude = x & magnitude_mask;
            counts[(magnitude >> shift) % digits] += (magnitude >> (shift + width)) == prefix_;
        };
        std::int64_t i = 0;
        for (; i + tables <= count; i += tables) {
            for (int k = 0; k < tables; ++k) add(counts_[k], bits[i + k]);
        }
        for (; i < count; ++i) add(counts_[0], bits[i]);

        for (std::uint32_t digit = digits - 1;; --digit) {
            std::int64_t here = 0;
            for (const auto& counts : counts_) here += counts[digit];
            if (here >= rank_) {
                prefix_ = prefix_ << width | digit;
                return;
            }
            rank_ -= here;
        }
    }

    RankedMagnitude found() const { return {prefix_, rank_}; }

  private:
    static constexpr int tables = 4;
    std::int64_t rank_;
    std::uint32_t prefix_ = 0;
    std::uint32_t counts_[tables][2048];
};

RankedMagnitude ranked_among_few(const std::uint32_t* bits, std::int64_t count, std::int64_t rank,
                                 std::uint32_t* magnitudes) {
    std::transform(bits, bits + count, magnitudes, [](std::uint32_t x) { return x & magnitude_mask; });
    std::nth_element(magnitudes, magnitudes + rank - 1, magnitudes + count, std::greater<>());
    const std::uint32_t magnitude = magnitudes[rank - 1];
    const auto above =
        std::count_if(magnitudes, magnitudes + rank, [=](std::uint32_t x) { return x > magnitude; });
    return {magnitude, rank - above};
}

std::uint32_t load_bits(const std::uint8_t* floats, std::int64_t i) {
    std::uint32_t bits;
    std::memcpy(&bits, floats + 4 * i, sizeof bits);
    return bits;
}

void require(bool condition, std::int64_t row, const std::string& complaint) {
    if (!condition) throw std::invalid_argument("segment " + std::to_string(row) + ": " + complaint);
}

}  // namespace

RankedMagnitude ranked_magnitude(const std::uint32_t* bits, std::int64_t count, std::int64_t rank) {
    constexpr std::int64_t few = 512;
    if (count <= few) {
        std::uint32_t magnitudes[few];
        return ranked_among_few(bits, count, rank, magnitudes);
    }
    DigitSearch search(rank);
    search.refine<20, 11>(bits, count);
    search.refine<10, 10>(bits, count);
    search.refine<0, 10>(bits, count);
    return search.found();
}

std::int64_t candidate_limit(std::int64_t length, std::int64_t count) {
    // Room for what a threshold from a sample lets through beyond `count`. Cutting the list down costs a few
    // passes over it and frees a third of it, so that each candidate is paid for a bounded number of times.
    constexpr std::int64_t slack = 8192;
    return std::min(length, count + count / 2 + slack);
}

std::int64_t sampled_vectors(std::int64_t length) {
    return std::min(length / 256, std::int64_t{4096});
}

std::int64_t candidate_capacity(const SegmentTable& table, const std::int64_t* counts) {
    // A block of elements, and a vector that is stored whole, come after the limit is looked at.
    constexpr std::int64_t overhang = 4096;
    std::int64_t capacity = 0;
    for (std::int64_t row = 0; row < table.size(); ++row) {
        const std::int64_t length = table[row].length;
        capacity = std::max(
            {capacity, candidate_limit(length, std::min(counts[row], length)), 16 * sampled_vectors(length)});
    }
    return capacity + overhang;
}

std::int64_t sample_size(std::int64_t length, std::int64_t stride, std::int64_t phase) {
    return phase < length ? (length - 1 - phase) / stride + 1 : length;
}

std::int64_t sample_capacity(const SegmentTable& table, std::int64_t stride, std::int64_t phase) {
    std::int64_t capacity = 0;
    for (std::int64_t row = 0; row < table.size(); ++row)
        capacity = std::max(capacity, sample_size(table[row].length, stride, phase));
    return capacity;
}

void sample_thresholds(const SampleCall& call) {
    for (std::int64_t row = 0; row < call.table.size(); ++row) {
        const Segment segment = call.table[row];
        call.thresholds[row] = std::numeric_limits<float>::infinity();
        if (call.counts[row] == 0) continue;
        const auto* next_residual = reinterpret_cast<const std::uint8_t*>(segment.next_residual);
        const std::int64_t size = sample_size(segment.length, call.stride, call.phase);
        const bool strided = call.phase < segment.length;
        const std::int64_t first = strided ? call.phase : 0;
        const std::int64_t step = strided ? call.stride : 1;
        for (std::int64_t j = 0; j < size; ++j)
            call.space[j] =
                std::min(load_bits(next_residual, first + j * step) & magnitude_mask, infinity_bits);
        const double share = static_cast<double>(call.counts[row]) * static_cast<double>(size) /
                             static_cast<double>(segment.length);
        const std::int64_t rank =
            std::clamp(static_cast<std::int64_t>(std::nearbyint(share)), std::int64_t{1}, size);
        call.thresholds[row] = std::bit_cast<float>(ranked_magnitude(call.space, size, rank).magnitude);
    }
}

void take(const TakeCall& call) {
    for (std::int64_t row = 0; row < call.table.size(); ++row) {
        const auto* next_residual = reinterpret_cast<const std::uint8_t*>(call.table[row].next_residual);
        const std::int64_t begin = call.offsets[row];
        for (std::int64_t i = begin; i < begin + call.counts[row]; ++i)
            std::memcpy(call.values + i, next_residual + 4 * std::int64_t{call.indices[i]}, sizeof(float));
    }
}

void put(const PutCall& call) {
    for (std::int64_t row = 0; row < call.table.size(); ++row) {
        auto* next_residual = reinterpret_cast<std::uint8_t*>(call.table[row].next_residual);
        const std::int64_t begin = call.offsets[row];
        for (std::int64_t i = begin; i < begin + call.counts[row]; ++i)
            std::memcpy(next_residual + 4 * std::int64_t{call.indices[i]}, call.values + i, sizeof(float));
    }
}

void check_layers(const SegmentTable& table) {
    for (std::int64_t row = 0; row < table.size(); ++row) {
        check_elements(row, table[row]);
        require(table[row].length <= max_layer_elements, row,
                "a layer has more than " + std::to_string(max_layer_elements) + " elements");
    }
}

void check_narrow(const SegmentTable& table) {
    for (std::int64_t row = 0; row < table.size(); ++row)
        require(table[row].dtype != Dtype::float64, row,
                "selections are made from float32 and half precision");
}

void check_next_residuals(const SegmentTable& table) {
    for (std::int64_t row = 0; row < table.size(); ++row)
        require(table[row].next_residual != 0 || table[row].length == 0, row, "the row has no next residual");
}

void check_counts(const SegmentTable& table, const std::int64_t* counts) {
    for (std::int64_t row = 0; row < table.size(); ++row)
        require(counts[row] >= 0 && counts[row] <= table[row].length, row, "the count is not in 0..length");
}

void check_places(const SegmentTable& table, const std::int64_t* offsets, const std::int64_t* counts,
                  std::int64_t capacity) {
    // Written as a difference: the sum of a hostile offset and a count could wrap.
    for (std::int64_t row = 0; row < table.size(); ++row)
        require(offsets[row] >= 0 && counts[row] >= 0 && counts[row] <= capacity &&
                    offsets[row] <= capacity - counts[row],
                row, "the selection does not lie inside arrays of " + std::to_string(capacity) + " items");
}

void check_indices(const SegmentTable& table, const std::int64_t* offsets, const std::int64_t* counts,
                   const std::uint32_t* indices) {
    for (std::int64_t row = 0; row < table.size(); ++row) {
        const std::uint32_t* const begin = indices + offsets[row];
        std::uint32_t largest = 0;
        for (std::int64_t i = 0; i < counts[row]; ++i) largest = std::max(largest, begin[i]);
        require(counts[row] == 0 || largest < table[row].length, row,
                "an index is not below the row's length");
    }
}

}  // namespace gradcomp
