// The checks of lists to scatter; body/ has the kernel.

#include <stdexcept>
#include <string>
#include <vector>

#include "indices.hpp"
#include "kernels.hpp"

namespace gradcomp {

void check_scatter_row(std::int64_t row, const Segment& segment, const ScatterCall& call,
                       std::int64_t capacity) {
    check_elements(row, segment);
    if (segment.dtype == Dtype::float64)
        throw std::invalid_argument("segment " + std::to_string(row) +
                                    ": scatter_mean writes no float64 outputs");
    if (call.flags[row] != 0) return;
    for (std::int64_t rank = 0; rank < call.ranks; ++rank) {
        const std::int64_t offset = call.offsets[rank * call.table.size() + row];
        const std::int64_t count = call.counts[rank * call.table.size() + row];
        if (count < 0 || count > capacity || offset < 0 || offset > capacity - count)
            throw std::invalid_argument("row " + std::to_string(row) +
                                        ": a list does not lie inside indices and values");
    }
}

void scatter_mean(const ScatterCall& call) {
    for (std::int64_t row = 0; row < call.table.size(); ++row) {
        const Segment segment = call.table[row];
        if (segment.output == 0 || call.flags[row] != 0) continue;
        for (std::int64_t rank = 0; rank < call.ranks; ++rank) {
            const std::int64_t list = rank * call.table.size() + row;
            check_ascending(row, call.indices + call.offsets[list], call.counts[list], segment.length);
        }
    }
    std::vector<ListPart> parts(static_cast<std::size_t>(call.ranks));
    active_kernels().scatter_mean(call, parts.data());
}

}  // namespace gradcomp
