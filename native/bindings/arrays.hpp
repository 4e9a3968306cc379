// What all bindings share: types in the signatures, checked views of arrays, and the call itself.

#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cfenv>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace gradcomp::bindings {

// Each adds its family's functions to the module.
void add_codecs(nb::module_& module);
void add_headers(nb::module_& module);
void add_indices(nb::module_& module);
void add_selections(nb::module_& module);
void add_low_rank(nb::module_& module);
void add_shared_memory(nb::module_& module);

// An array of another type is refused, not copied.
inline auto array(const char* name) {
    return nb::arg(name).noconvert();
}

using Bytes = nb::ndarray<std::uint8_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const std::uint8_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// A segment table: one row of bytes per segment.
using Rows = nb::ndarray<const std::uint8_t, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class Item>
using Vector = nb::ndarray<Item, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstFloats = Vector<const float>;
using ConstNumbers = Vector<const std::int64_t>;

inline std::int64_t size(const ConstBytes& bytes) {
    return static_cast<std::int64_t>(bytes.size());
}

inline std::int64_t size(const Bytes& bytes) {
    return static_cast<std::int64_t>(bytes.size());
}

inline gradcomp::SegmentTable view_table(const Rows& rows) {
    if (rows.shape(1) != sizeof(gradcomp::Segment))
        throw std::invalid_argument("the rows of the table do not have the size of a segment");
    return {rows.data(), static_cast<std::int64_t>(rows.shape(0))};
}

inline void check_per_segment(const char* name, const Bytes& bytes, const gradcomp::SegmentTable& table) {
    if (size(bytes) != table.size())
        throw std::invalid_argument(std::string(name) + " has " + std::to_string(bytes.size()) +
                                    " items for " + std::to_string(table.size()) + " segments");
}

template <class Array>
void check_aligned(const char* name, const Array& array) {
    if (reinterpret_cast<std::uintptr_t>(array.data()) % sizeof(*array.data()) != 0)
        throw nb::type_error((std::string(name) + " must be aligned to its items").c_str());
}

template <class Item>
const Item* view_column(const char* name, const Vector<const Item>& column, std::size_t rows) {
    check_aligned(name, column);
    if (column.size() != rows)
        throw std::invalid_argument(std::string(name) + " has " + std::to_string(column.size()) +
                                    " items for " + std::to_string(rows) + " rows");
    return column.data();
}

template <class Number>
void check_rows(const char* name, const Vector<Number>& vector, const gradcomp::SegmentTable& table) {
    check_aligned(name, vector);
    if (static_cast<std::int64_t>(vector.size()) != table.size())
        throw std::invalid_argument(std::string(name) + " has " + std::to_string(vector.size()) +
                                    " items for " + std::to_string(table.size()) + " segments");
}

// A copy: what was checked stays so, whatever else happens to the array during the call.
inline std::vector<std::int64_t> copy_rows(const char* name, const ConstNumbers& vector,
                                           const gradcomp::SegmentTable& table) {
    check_rows(name, vector, table);
    return {vector.data(), vector.data() + vector.size()};
}

// Round to nearest, keep subnormal numbers: the calling thread may have chosen otherwise.
class DefaultFloatEnvironment {
  public:
    DefaultFloatEnvironment() {
        std::fegetenv(&callers_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloatEnvironment() { std::fesetenv(&callers_); }
    DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
    DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

  private:
    std::fenv_t callers_;
};

template <class Call>
void run(void (*kernel)(const Call&), const Call& call) {
    const nb::gil_scoped_release released;
    const DefaultFloatEnvironment environment;
    kernel(call);
}

}  // namespace gradcomp::bindings
