// Headers of messages: the layout is that of gradcomp/kernels/reference_headers.py, little-endian as the CPU
// is.

#pragma once

#include <cstdint>

namespace gradcomp {

struct HeaderFields {
    std::uint16_t magic;
    std::uint8_t protocol;
    std::uint8_t round;
    std::uint32_t check;
    std::uint32_t step;
    std::uint16_t bucket;
    std::uint16_t chunk;
    std::uint32_t payload_bytes;
    std::uint16_t layers;
    std::uint16_t sender;
    std::uint32_t fingerprint;
    std::uint32_t checksum;
};
static_assert(sizeof(HeaderFields) == 32);

// Where a header's payload begins.
constexpr std::int64_t header_bytes(std::int64_t states) {
    return (std::int64_t{sizeof(HeaderFields)} + states + 15) / 16 * 16;
}

// A message of whole bytes, and the states of its header.
struct HeaderTarget {
    std::uint8_t* message;
    std::int64_t length;
    std::int64_t states;
};

// Writes a header with these states; its checksum is computed if there are checksums. Returns that of the
// payload.
std::uint32_t write_header(const HeaderTarget& target, HeaderFields fields, const std::uint8_t* states,
                           bool checksums);

struct HeaderCheck {
    const std::uint8_t* known;  // bits that states may have
    const std::uint8_t* sent;   // bits that they must have; may be null
    bool checksums;
};

struct HeaderFound {
    std::uint32_t fingerprint;
    std::uint32_t payload;
    std::uint8_t rank;
};

// Whether the header is as expected; adds its states to `states`, and fills `found`.
bool read_header(const HeaderTarget& source, const HeaderFields& expected, const HeaderCheck& check,
                 std::uint8_t* states, HeaderFound& found);

}  // namespace gradcomp
