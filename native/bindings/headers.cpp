// The headers of messages that travel together.

#include "headers.hpp"

#include <algorithm>
#include <cstring>

#include "arrays.hpp"

namespace gradcomp::bindings {

namespace {

using Words = Vector<std::uint32_t>;

// What both functions take: the fixed fields, the addresses and the lengths of messages.
class HeaderRows {
  public:
    HeaderRows(const ConstBytes& fields, const ConstNumbers& messages, const ConstNumbers& lengths,
               std::int64_t states)
        : fields_(fields.data()),
          messages_(messages.data()),
          lengths_(lengths.data()),
          states_(states),
          count_(messages.size()) {
        view_column("messages", messages, count_);
        view_column("lengths", lengths, count_);
        check_size("fields", fields.size(), count_ * sizeof(gradcomp::HeaderFields));
        if (states < 1) throw std::invalid_argument("a header has the state of its rank at least");
        const std::int64_t begin = gradcomp::header_bytes(states);
        if (std::any_of(lengths_, lengths_ + count_, [begin](std::int64_t length) { return length < begin; }))
            throw std::invalid_argument("a message is shorter than its header of " + std::to_string(begin));
    }

    std::size_t size() const { return count_; }

    gradcomp::HeaderTarget target(std::size_t i) const {
        return {reinterpret_cast<std::uint8_t*>(messages_[i]), lengths_[i], states_};
    }

    gradcomp::HeaderFields fields(std::size_t i, std::uint32_t check, std::uint32_t step,
                                  std::uint16_t bucket, std::uint8_t round) const {
        gradcomp::HeaderFields found;
        std::memcpy(&found, fields_ + i * sizeof found, sizeof found);
        found.check = check;
        found.step = step;
        found.bucket = bucket;
        found.round = round;
        return found;
    }

    static void check_size(const char* name, std::size_t size, std::size_t expected) {
        if (size != expected)
            throw std::invalid_argument(std::string(name) + " has " + std::to_string(size) +
                                        " items instead of " + std::to_string(expected));
    }

    void check_words(const char* name, const Words& words) const {
        check_aligned(name, words);
        check_size(name, words.size(), count_);
    }

  private:
    const std::uint8_t* fields_;
    const std::int64_t* messages_;
    const std::int64_t* lengths_;
    std::int64_t states_;
    std::size_t count_;
};

void write_headers(const ConstBytes& fields, const ConstNumbers& messages, const ConstNumbers& lengths,
                   const ConstBytes& states, const Words& payloads, std::uint32_t check, std::uint32_t step,
                   std::uint16_t bucket, std::uint8_t round, std::uint16_t sender, std::uint32_t fingerprint,
                   bool checksums) {
    const HeaderRows rows(fields, messages, lengths, size(states));
    rows.check_words("payloads", payloads);
    const nb::gil_scoped_release released;
    for (std::size_t i = 0; i < rows.size(); ++i) {
        gradcomp::HeaderFields own = rows.fields(i, check, step, bucket, round);
        own.sender = sender;
        own.fingerprint = fingerprint;
        payloads.data()[i] = gradcomp::write_header(rows.target(i), own, states.data(), checksums);
    }
}

std::int64_t read_headers(const ConstBytes& fields, const ConstNumbers& messages, const ConstNumbers& lengths,
                          const ConstBytes& known, const ConstBytes& sent, const Bytes& states,
                          const Words& fingerprints, const Words& payloads, const Bytes& ranks,
                          std::uint32_t check, std::uint32_t step, std::uint16_t bucket, std::uint8_t round,
                          bool checksums) {
    const HeaderRows rows(fields, messages, lengths, size(states));
    HeaderRows::check_size("known", known.size(), states.size());
    if (sent.size() != 0) HeaderRows::check_size("sent", sent.size(), states.size());
    rows.check_words("fingerprints", fingerprints);
    rows.check_words("payloads", payloads);
    HeaderRows::check_size("ranks", ranks.size(), rows.size());
    const gradcomp::HeaderCheck wanted{known.data(), sent.size() == 0 ? nullptr : sent.data(), checksums};
    const nb::gil_scoped_release released;
    for (std::size_t i = 0; i < rows.size(); ++i) {
        gradcomp::HeaderFound found;
        if (!gradcomp::read_header(rows.target(i), rows.fields(i, check, step, bucket, round), wanted,
                                   states.data(), found))
            return static_cast<std::int64_t>(i);
        fingerprints.data()[i] = found.fingerprint;
        payloads.data()[i] = found.payload;
        ranks.data()[i] = found.rank;
    }
    return -1;
}

}  // namespace

void add_headers(nb::module_& module) {
    module.def("write_headers", &write_headers, array("fields"), array("messages"), array("lengths"),
               array("states"), array("payloads"), nb::kw_only(), "check"_a, "step"_a, "bucket"_a,
               "round_number"_a, "sender"_a, "fingerprint"_a, "checksums"_a);
    module.def("read_headers", &read_headers, array("fields"), array("messages"), array("lengths"),
               array("known"), array("sent"), array("states"), array("fingerprints"), array("payloads"),
               array("ranks"), nb::kw_only(), "check"_a, "step"_a, "bucket"_a, "round_number"_a,
               "checksums"_a);
}

}  // namespace gradcomp::bindings
