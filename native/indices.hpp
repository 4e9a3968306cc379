// The coding of index lists; gradcomp/kernels/reference_indices.py describes the formats.
#pragma once

#include <cstdint>

namespace gradcomp {

enum class Coding : std::int32_t { raw = 0, packed = 1, bitmap = 2, all = 3 };

// The list of one row.
struct IndexRow {
    Coding coding;
    std::int64_t length;  // indices are below it
    std::int64_t count;
    std::int64_t offset;  // of the first index
    std::int64_t place;   // byte offset in the payload
};

// The rows, as columns.
struct IndexTable {
    std::int64_t rows;
    const std::int32_t* codings;
    const std::int64_t* lengths;
    const std::int64_t* counts;
    const std::int64_t* offsets;
    const std::int64_t* places;

    IndexRow operator[](std::int64_t row) const {
        return {static_cast<Coding>(codings[row]), lengths[row], counts[row], offsets[row], places[row]};
    }
};

struct EncodeIndicesCall {
    IndexTable table;
    const std::uint32_t* indices;
    std::uint8_t* payload;
};

struct DecodeIndicesCall {
    IndexTable table;
    std::uint32_t* indices;
    const std::uint8_t* payload;
};

// Throw std::invalid_argument, naming the row, unless all numbers are in range and the list lies inside
// arrays of these sizes.
void check_index_row(std::int64_t row, const IndexRow& list, std::int64_t indices,
                     std::int64_t payload_bytes);

// Throw std::invalid_argument, naming the row, unless indices are ascending, distinct and below the length.
void check_ascending(std::int64_t row, const std::uint32_t* indices, std::int64_t count, std::int64_t length);

// Both throw std::invalid_argument, naming the row: encode for indices out of range or order, decode for
// bytes that encode does not write.
void encode_indices(const EncodeIndicesCall& call);
void decode_indices(const DecodeIndicesCall& call);

}  // namespace gradcomp
