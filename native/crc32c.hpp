// CRC-32C (Castagnoli) of bytes.

#pragma once

#include <cstddef>
#include <cstdint>

namespace gradcomp {

// The CRC of what `value` is the CRC of, followed by these bytes; 0 is that of nothing.
std::uint32_t crc32c(const std::uint8_t* data, std::size_t size, std::uint32_t value);

}  // namespace gradcomp
