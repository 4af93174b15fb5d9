#include "engine/constrain/token_trie.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace sluice::constrain {

TokenTrie::TokenTrie(const Tokenizer& tokenizer) : vocabulary_(tokenizer.vocabulary()) {
  std::vector<std::pair<std::string_view, TokenId>> all;
  offsets_.push_back(0);
  for (TokenId id = 0; id < std::min(tokenizer.size(), vocabulary_); ++id) {
    const std::string_view bytes = tokenizer.bytes(id);
    bytes_ += bytes;
    offsets_.push_back(bytes_.size());
    if (!bytes.empty()) all.emplace_back(bytes, id);
  }
  std::sort(all.begin(), all.end());  // by bytes as unsigned characters
  std::vector<std::size_t> path;      // nodes of the last token
  const auto close = [&](std::size_t depth) {
    while (path.size() > depth) {
      nodes_[path.back()].after = static_cast<std::int32_t>(nodes_.size());
      path.pop_back();
    }
  };
  std::string_view last;
  for (const auto& [bytes, id] : all) {
    const auto common = static_cast<std::size_t>(
        std::mismatch(bytes.begin(), bytes.end(), last.begin(), last.end()).first - bytes.begin());
    close(common);
    for (std::size_t i = common; i < bytes.size(); ++i) {
      path.push_back(nodes_.size());
      nodes_.push_back({static_cast<std::uint8_t>(bytes[i]), static_cast<std::int32_t>(i + 1), 0,
                        static_cast<std::int32_t>(tokens_.size())});
    }
    tokens_.push_back(id);
    most_depth_ = std::max(most_depth_, static_cast<std::int32_t>(bytes.size()));
    last = bytes;
  }
  close(0);
  nodes_.push_back({0, 0, 0, static_cast<std::int32_t>(tokens_.size())});
}

}  // namespace sluice::constrain
