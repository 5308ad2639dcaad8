// A stop string is searched in the bytes of the last tokens, so a cut inside a character or a word makes no difference.
#include "decode/stop.h"

#include <algorithm>

#include "core/check.h"

namespace maga {

Vocabulary::Vocabulary(const std::vector<std::string>& token_bytes) {
  start_.reserve(token_bytes.size() + 1);
  for (const std::string& bytes : token_bytes) {
    start_.push_back(bytes_.size());
    bytes_ += bytes;
  }
  start_.push_back(bytes_.size());
}

std::string_view Vocabulary::bytes(int32_t token) const {
  if (token < 0 || token + size_t{1} >= start_.size()) return {};
  return std::string_view(bytes_).substr(start_[token], start_[token + 1] - start_[token]);
}

StopMatcher::StopMatcher(const SamplingParams& params, std::shared_ptr<const Vocabulary> vocabulary)
    : params_(&params), vocabulary_(std::move(vocabulary)) {
  for (const std::string& text : params.stop_strings) longest_ = std::max(longest_, text.size());
  MAGA_CHECK(longest_ == 0 || vocabulary_, "stop strings need the vocabulary");
}

StopMatch StopMatcher::append(std::span<const int32_t> output) {
  StopMatch match;
  const int32_t token = output.back();
  if (longest_ > 0) match.stop_string = find_string(vocabulary_->bytes(token));
  if (static_cast<int64_t>(output.size()) < params_->min_new_tokens) return {};

  const auto& tokens = params_->stop_token_ids;
  if (std::find(tokens.begin(), tokens.end(), token) != tokens.end()) return {.stop_token = token};
  for (size_t i = 0; i < params_->stop_words.size(); ++i) {
    const auto& word = params_->stop_words[i];
    if (word.size() <= output.size() && std::equal(word.begin(), word.end(), output.end() - word.size()))
      return {.stop_word = static_cast<int32_t>(i)};
  }
  return match;
}

int32_t StopMatcher::find_string(std::string_view added) {
  const size_t before = tail_.size();
  tail_ += added;
  int32_t found = -1;
  size_t first = std::string::npos;
  for (size_t i = 0; i < params_->stop_strings.size(); ++i) {
    const std::string& text = params_->stop_strings[i];
    // It must end in the new bytes: what ended earlier was found earlier, or came before min_new_tokens.
    const size_t from = before + 1 > text.size() ? before + 1 - text.size() : 0;
    const size_t at = tail_.find(text, from);
    if (at < first) {
      first = at;
      found = static_cast<int32_t>(i);
    }
  }
  if (tail_.size() >= longest_) tail_.erase(0, tail_.size() - (longest_ - 1));
  return found;
}

}  // namespace maga
