#include "lowrank.hpp"

#include <stdexcept>
#include <string>

namespace gradcomp {

namespace {

void require(bool condition, std::int64_t row, const std::string& complaint) {
    if (!condition) throw std::invalid_argument("segment " + std::to_string(row) + ": " + complaint);
}

}  // namespace

Matrix LowRankLayers::matrix(std::int64_t row) const {
    return {rows[row], columns[row], ranks[row]};
}

std::int64_t lowrank_workspace(std::int64_t rank) {
    // A row for each column of Q, four for a tile of M, all with vectors to spare at their ends.
    return (rank + 5) * (lowrank_columns + 64);
}

void check_factor(std::int64_t row, const char* name, std::int64_t at, std::int64_t length,
                  std::int64_t count, std::int64_t size) {
    const bool inside =
        at >= 0 && at <= size && length >= 0 && count >= 0 && (length == 0 || count <= (size - at) / length);
    require(inside, row, std::string(name) + " does not lie inside its array");
}

std::int64_t check_low_rank(const LowRankLayers& layers, std::int64_t p_size, std::int64_t q_size,
                            bool outputs) {
    std::int64_t largest = 0;
    for (std::int64_t row = 0; row < layers.table.size(); ++row) {
        const Segment segment = layers.table[row];
        if (outputs && segment.output == 0) continue;
        const Matrix matrix = layers.matrix(row);
        check_elements(row, segment);
        require(segment.dtype != Dtype::float64, row, "low rank has no float64");
        require(outputs || segment.next_residual != 0 || segment.length == 0, row,
                "no next residual to hold the matrix");
        // Written as a quotient: the product of hostile numbers could wrap.
        require(matrix.rows >= 0 && matrix.columns >= 0 &&
                    (matrix.columns == 0 || matrix.rows <= max_elements / matrix.columns) &&
                    matrix.rows * matrix.columns == segment.length,
                row, "rows times columns is not the length of the segment");
        check_factor(row, "P", layers.p_at[row], matrix.rows, matrix.rank, p_size);
        check_factor(row, "Q", layers.q_at[row], matrix.columns, matrix.rank, q_size);
        if (matrix.columns > 0 && matrix.rank > largest) largest = matrix.rank;
    }
    return largest;
}

}  // namespace gradcomp
