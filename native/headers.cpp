#include "headers.hpp"

#include <cstddef>
#include <cstring>

#include "crc32c.hpp"

namespace gradcomp {

namespace {

constexpr std::size_t fixed_bytes = sizeof(HeaderFields);
constexpr std::size_t compared_bytes = offsetof(HeaderFields, fingerprint);
constexpr std::size_t checksum_at = offsetof(HeaderFields, checksum);

std::uint32_t payload_checksum(const HeaderTarget& target) {
    const std::int64_t begin = header_bytes(target.states);
    return crc32c(target.message + begin, static_cast<std::size_t>(target.length - begin), 0);
}

std::uint32_t whole_checksum(const HeaderTarget& target, std::uint32_t payload) {
    const auto begin = static_cast<std::size_t>(header_bytes(target.states));
    return crc32c(target.message + fixed_bytes, begin - fixed_bytes,
                  crc32c(target.message, checksum_at, payload));
}

}  // namespace

std::uint32_t write_header(const HeaderTarget& target, HeaderFields fields, const std::uint8_t* states,
                           bool checksums) {
    const auto count = static_cast<std::size_t>(target.states);
    const auto begin = static_cast<std::size_t>(header_bytes(target.states));
    fields.checksum = 0;
    std::memcpy(target.message, &fields, fixed_bytes);
    std::memcpy(target.message + fixed_bytes, states, count);
    std::memset(target.message + fixed_bytes + count, 0, begin - fixed_bytes - count);
    if (!checksums) return 0;
    const std::uint32_t payload = payload_checksum(target);
    const std::uint32_t whole = whole_checksum(target, payload);
    std::memcpy(target.message + checksum_at, &whole, sizeof whole);
    return payload;
}

bool read_header(const HeaderTarget& source, const HeaderFields& expected, const HeaderCheck& check,
                 std::uint8_t* states, HeaderFound& found) {
    HeaderFields fields;
    std::memcpy(&fields, source.message, fixed_bytes);
    if (std::memcmp(source.message, &expected, compared_bytes) != 0) return false;
    found.payload = 0;
    if (check.checksums) {
        found.payload = payload_checksum(source);
        if (whole_checksum(source, found.payload) != fields.checksum) return false;
    }
    const std::uint8_t* const own = source.message + fixed_bytes;
    unsigned wrong = 0;
    for (std::int64_t i = 0; i < source.states; ++i) {
        wrong |= own[i] & ~unsigned{check.known[i]};
        if (check.sent != nullptr) wrong |= check.sent[i] & ~unsigned{own[i]};
        states[i] = static_cast<std::uint8_t>(states[i] | own[i]);
    }
    found.fingerprint = fields.fingerprint;
    found.rank = own[source.states - 1];
    return wrong == 0;
}

}  // namespace gradcomp
