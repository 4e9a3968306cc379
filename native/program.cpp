// The dynamic program but for the loop over the cells of a row, which is in body/program.hpp.

#include "program.hpp"

#include <algorithm>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels.hpp"

namespace gradcomp {

namespace {

constexpr std::int32_t never = std::numeric_limits<std::int32_t>::max();
constexpr double infinity = std::numeric_limits<double>::infinity();

struct Choice {
    std::int32_t steps;
    std::int32_t number;
    double cost;
};

// The choices of a layer that can be part of the answer: more steps, less cost.
struct Candidates {
    std::int32_t least = 0;           // steps of the first, which those of all are less by
    std::vector<std::int32_t> steps;  // ascending, from 0
    std::vector<double> costs;        // descending
    std::vector<std::int32_t> numbers;

    void keep(const Choice& choice) {
        if (steps.empty()) least = choice.steps;
        steps.push_back(choice.steps - least);
        costs.push_back(choice.cost);
        numbers.push_back(choice.number);
    }
    void drop_beyond(std::int64_t slack) {
        const auto kept = std::upper_bound(steps.begin(), steps.end(), slack) - steps.begin();
        steps.resize(static_cast<std::size_t>(kept));
        costs.resize(static_cast<std::size_t>(kept));
        numbers.resize(static_cast<std::size_t>(kept));
    }
};

void require(bool condition, std::int64_t layer, const char* complaint) {
    if (!condition) throw std::invalid_argument("layer " + std::to_string(layer) + ": " + complaint);
}

Candidates find_candidates(const CheapestCall& call, std::int64_t layer) {
    std::vector<Choice> choices;
    for (std::int64_t c = 0; c < call.choices; ++c) {
        const std::int64_t at = layer * call.choices + c;
        const Choice choice{call.steps[at], static_cast<std::int32_t>(c), call.costs[at]};
        require(choice.steps >= 0, layer, "steps are negative");
        require(choice.cost >= 0.0, layer, "a cost is negative or not a number");
        if (choice.steps != never && choice.cost != infinity) choices.push_back(choice);
    }
    std::sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) {
        if (a.steps != b.steps) return a.steps < b.steps;
        return a.cost != b.cost ? a.cost < b.cost : a.number < b.number;
    });
    Candidates candidates;
    for (const Choice& choice : choices) {
        if (candidates.costs.empty() || choice.cost < candidates.costs.back()) candidates.keep(choice);
    }
    return candidates;
}

// Two rows of costs, one behind the other in time.
class CostRows {
  public:
    explicit CostRows(std::int64_t cells) : before_(row(cells)), after_(row(cells)) {
        before()[0] = 0.0;
        close(before(), 1);
    }

    double* before() { return before_.get() + row_margin; }
    double* after() { return after_.get() + row_margin; }
    void next(std::int64_t cells) {
        close(after(), cells);
        std::swap(before_, after_);
    }

  private:
    static std::unique_ptr<double[]> row(std::int64_t cells) {
        auto memory =
            std::make_unique_for_overwrite<double[]>(static_cast<std::size_t>(cells + 2 * row_margin));
        std::fill_n(memory.get(), row_margin, infinity);
        return memory;
    }
    static void close(double* row, std::int64_t cells) { std::fill_n(row + cells, row_margin, infinity); }

    std::unique_ptr<double[]> before_, after_;
};

// What was taken in each cell of each layer's row.
class Taken {
  public:
    Taken(const std::vector<std::int64_t>& cells, bool wide) : wide_(wide) {
        std::int64_t total = 0;
        for (const std::int64_t count : cells) {
            begins_.push_back(total);
            total += count;
        }
        memory_ = std::make_unique_for_overwrite<std::uint8_t[]>(
            static_cast<std::size_t>((total + row_margin) * bytes()));
    }

    std::uint8_t* row(std::size_t layer) { return memory_.get() + begins_[layer] * bytes(); }
    std::size_t at(std::size_t layer, std::int64_t cell) {
        if (!wide_) return row(layer)[cell];
        return reinterpret_cast<const std::uint16_t*>(row(layer))[cell];
    }

  private:
    std::int64_t bytes() const { return wide_ ? 2 : 1; }

    bool wide_;
    std::vector<std::int64_t> begins_;
    std::unique_ptr<std::uint8_t[]> memory_;
};

// Cells of the row behind each layer: all errors within reach, and within the slack.
std::vector<std::int64_t> count_cells(const std::vector<Candidates>& layers, std::int64_t slack) {
    std::vector<std::int64_t> cells;
    std::int64_t reach = 0;
    for (const Candidates& layer : layers) {
        reach = std::min(reach + layer.steps.back(), slack);
        cells.push_back(reach + 1);
    }
    if (reach > max_reach)
        throw std::invalid_argument("the budget leaves more than " + std::to_string(max_reach) +
                                    " steps to choose from");
    return cells;
}

}  // namespace

void cheapest(const CheapestCall& call) {
    *call.found = false;
    std::vector<Candidates> layers;
    for (std::int64_t layer = 0; layer < call.layers; ++layer) layers.push_back(find_candidates(call, layer));

    std::int64_t slack = call.budget;
    double dearest = 0.0;
    for (const Candidates& layer : layers) {
        if (layer.steps.empty()) return;
        slack -= layer.least;
        dearest += layer.costs.front();
    }
    if (slack < 0) return;
    if (dearest == infinity) throw std::invalid_argument("the costs add up to more than a float64 holds");

    bool wide = false;
    for (Candidates& layer : layers) {
        layer.drop_beyond(slack);
        wide = wide || layer.steps.size() > 256;
    }
    const std::vector<std::int64_t> cells = count_cells(layers, slack);
    CostRows rows(cells.empty() ? 1 : cells.back());
    Taken taken(cells, wide);
    std::int64_t before_cells = 1;
    for (std::size_t layer = 0; layer < layers.size(); ++layer) {
        const Candidates& candidates = layers[layer];
        active_kernels().relax({rows.before(), before_cells, rows.after(), cells[layer],
                                candidates.steps.data(), candidates.costs.data(),
                                static_cast<std::int64_t>(candidates.steps.size()), taken.row(layer), wide});
        before_cells = cells[layer];
        rows.next(before_cells);
    }

    std::int64_t cell = std::min_element(rows.before(), rows.before() + before_cells) - rows.before();
    for (std::size_t layer = layers.size(); layer-- > 0;) {
        const std::size_t candidate = taken.at(layer, cell);
        call.chosen[layer] = layers[layer].numbers[candidate];
        cell -= layers[layer].steps[candidate];
    }
    *call.found = true;
}

}  // namespace gradcomp
