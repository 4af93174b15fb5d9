// Calls of the C interface, one on each line: its name, then numbers and words; "-" leaves one out.
// Objects are numbered in the order in which they are made; numbers of freed objects, and of
// objects that were never made, are handles, too. Every call returns a code of sluice.h, with a
// message of one line unless that is SLUICE_OK, and writes only to the caller's buffers.
#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <memory>
#include <type_traits>
#include <vector>

#include "bindings/c/sluice.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/small_engine.h"

namespace sluice::fuzz {
namespace {

constexpr int kMostCalls = 48;
constexpr std::size_t kMostTokens = 96;
constexpr std::int32_t kLayers = 2;  // of the caches

// The words of a line.
class Words {
 public:
  explicit Words(std::string_view line) : rest_(line) {}

  std::string_view word() {
    const std::size_t begin = std::min(rest_.find_first_not_of(' '), rest_.size());
    const std::size_t end = std::min(rest_.find(' ', begin), rest_.size());
    const std::string_view word = rest_.substr(begin, end - begin);
    rest_.remove_prefix(end);
    return word;
  }
  // 0 if the word is not a number.
  std::int64_t number() {
    const std::string_view digits = word();
    std::int64_t value = 0;
    std::from_chars(digits.data(), digits.data() + digits.size(), value);
    return value;
  }
  // Words with `_` for blanks; null for "-" and nothing.
  const char* text() {
    std::string text(word());
    if (text.empty() || text == "-") return nullptr;
    std::replace(text.begin(), text.end(), '_', ' ');
    return texts_.emplace_back(std::make_unique<std::string>(std::move(text)))->c_str();
  }
  // The bytes of a word as token ids, or one id for a number.
  std::vector<std::int32_t> tokens() {
    const std::string_view bytes = word();
    std::int32_t id = 0;
    const auto [end, status] = std::from_chars(bytes.data(), bytes.data() + bytes.size(), id);
    if (status == std::errc{} && end == bytes.data() + bytes.size()) return {id};
    std::vector<std::int32_t> ids;
    for (const char byte : bytes.substr(0, kMostTokens)) {
      ids.push_back(static_cast<unsigned char>(byte));
    }
    return ids;
  }

 private:
  std::string_view rest_;
  std::vector<std::unique_ptr<std::string>> texts_;
};

// A caller's buffer. A call may use its first `capacity` elements.
template <typename T>
class Buffer {
 public:
  explicit Buffer(std::int64_t capacity)
      : capacity_(static_cast<std::size_t>(std::clamp<std::int64_t>(capacity, 0, 4096))),
        elements_(capacity_ + kBehind, kUnused) {}
  ~Buffer() {
    const auto behind = elements_.begin() + static_cast<std::ptrdiff_t>(capacity_);
    require(std::all_of(behind, elements_.end(), [](T one) { return one == kUnused; }),
            "a call stays within the caller's buffer");
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* data() { return elements_.data(); }
  std::size_t capacity() const { return capacity_; }

 private:
  static constexpr std::size_t kBehind = 16;
  static constexpr T kUnused = T{77};
  std::size_t capacity_;
  std::vector<T> elements_;
};

sluice_engine* engine() {
  static sluice_engine* const engine = [] {
    const std::string model = small_model().string();
    sluice_engine_options options{};
    options.size = sizeof options;
    options.model = model.c_str();
    options.threads = 1;
    options.chunk = 32;
    sluice_engine* opened = nullptr;
    require(sluice_engine_open(&options, &opened) == SLUICE_OK, sluice_message());
    return opened;
  }();
  return engine;
}

// What the calls of one input have made.
class Caller {
 public:
  Caller() = default;
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;
  ~Caller() {
    for (auto* step : steps_) sluice_kv_step_free(step);
    for (auto* stream : streams_) sluice_stream_free(stream);
    for (auto* batcher : batchers_) sluice_batcher_free(batcher);
    for (auto* session : sessions_) sluice_session_free(session);
    for (auto* sequence : sequences_) sluice_kv_sequence_free(sequence);
    for (auto* cache : caches_) sluice_kv_cache_free(cache);
    for (auto* constraint : constraints_) sluice_constraint_free(constraint);
    for (auto* cancel : cancels_) sluice_cancel_free(cancel);
  }

  // Returns the code, or -1 if there is no such call.
  sluice_code run(std::string_view line) {
    Words words(line);
    const auto found = calls().find(words.word());
    if (found == calls().end()) return -1;
    const sluice_code code = (this->*found->second)(words);
    const std::string message = sluice_message();
    require(code >= SLUICE_OK && code <= SLUICE_TOO_SMALL, "a code of sluice.h");
    require(message.empty() == (code == SLUICE_OK), "a message unless all is well");
    require(message.size() <= 2000 && !invalid_utf8_at(message), "a message is short and UTF-8");
    require(std::none_of(message.begin(), message.end(),
                         [](char c) { return static_cast<unsigned char>(c) < 0x20; }),
            "a message is one line");
    return code;
  }

 private:
  using Call = sluice_code (Caller::*)(Words&);

  // The object with this number; null or nothing that was ever made for other numbers.
  template <typename T>
  static T* at(const std::vector<T*>& all, Words& words) {
    const std::int64_t i = words.number();
    if (i >= 0 && static_cast<std::size_t>(i) < all.size()) return all[static_cast<std::size_t>(i)];
    // NOLINTNEXTLINE(performance-no-int-to-ptr): a wild handle
    return i < 0 ? nullptr : reinterpret_cast<T*>(static_cast<std::uintptr_t>(i));
  }
  // The same, and "-" for none.
  template <typename T>
  static T* maybe(const std::vector<T*>& all, Words& words) {
    const std::string_view word = words.word();
    if (word.empty() || word == "-") return nullptr;
    Words number(word);
    return at(all, number);
  }
  template <typename T>
  static sluice_code made(std::vector<T*>& all, T* object, sluice_code code) {
    require((object != nullptr) == (code == SLUICE_OK), "a call makes an object or fails");
    if (object != nullptr) all.push_back(object);
    return code;
  }

  // A call that takes an object alone, with a number, or with a text.
  template <auto kCall, auto kObjects>
  sluice_code with(Words& words) {
    return kCall(at(this->*kObjects, words));
  }
  template <auto kCall, auto kObjects>
  sluice_code with_number(Words& words) {
    auto* const object = at(this->*kObjects, words);
    return kCall(object, words.number());
  }
  template <auto kCall, auto kObjects>
  sluice_code with_text(Words& words) {
    auto* const object = at(this->*kObjects, words);
    return kCall(object, words.text());
  }
  // A call that makes an object of another one.
  template <auto kCall, auto kFrom, auto kTo>
  sluice_code make(Words& words) {
    std::remove_cvref_t<decltype((this->*kTo).front())> object = nullptr;
    const sluice_code code = kCall(at(this->*kFrom, words), &object);
    return made(this->*kTo, object, code);
  }

  sluice_code open_session(Words& words) {
    sluice_session_options options{};
    options.size = sizeof options;
    options.context = words.number();
    const char* const policy = words.text();
    options.policies = policy != nullptr ? &policy : nullptr;
    options.policy_count = policy != nullptr ? 1 : 0;
    options.sequences = static_cast<std::int32_t>(words.number());
    options.decode_batch = static_cast<std::int32_t>(words.number());
    options.device_memory = static_cast<std::uint64_t>(words.number());
    options.loads = 1;
    sluice_session* session = nullptr;
    // What is planned for is taken at once.
    if (options.context > 1024 || options.sequences > 16) return refuse();
    const sluice_code code = sluice_session_open(engine(), &options, &session);
    return made(sessions_, session, code);
  }
  sluice_code prefill(Words& words) {
    auto* const session = at(sessions_, words);
    const std::vector<std::int32_t> tokens = words.tokens();
    Buffer<float> logits(words.number());
    auto* const cancel = maybe(cancels_, words);
    float* const to = logits.capacity() > 0 ? logits.data() : nullptr;
    return sluice_session_prefill(session, tokens.data(), tokens.size(), nullptr, nullptr, cancel,
                                  to, logits.capacity());
  }
  sluice_code recompute(Words& words) {
    auto* const session = at(sessions_, words);
    auto* const cancel = maybe(cancels_, words);
    return sluice_session_recompute(session, nullptr, nullptr, cancel, nullptr, 0);
  }
  sluice_code decode(Words& words) {
    auto* const session = at(sessions_, words);
    const auto token = static_cast<std::int32_t>(words.number());
    Buffer<float> logits(words.number());
    float* const to = logits.capacity() > 0 ? logits.data() : nullptr;
    return sluice_session_decode(session, token, to, logits.capacity());
  }
  sluice_code score(Words& words) {
    auto* const session = at(sessions_, words);
    const std::vector<std::int32_t> tokens = words.tokens();
    Buffer<float> logprobs(words.number());
    return sluice_session_score(session, tokens.data(), tokens.size(), logprobs.data(),
                                logprobs.capacity());
  }
  sluice_code ledger(Words& words) {
    auto* const session = at(sessions_, words);
    Buffer<char> json(words.number());
    std::size_t bytes = 0;
    return sluice_session_ledger_json(session, json.data(), json.capacity(), &bytes);
  }
  sluice_code tokens(Words& words) {
    auto* const session = at(sessions_, words);
    Buffer<std::int32_t> tokens(words.number());
    std::size_t count = 0;
    return sluice_session_tokens(session, tokens.data(), tokens.capacity(), &count);
  }
  sluice_code step(Words& words) {
    std::array<sluice_session*, 2> both{at(sessions_, words), at(sessions_, words)};
    const std::array<std::int32_t, 2> tokens{static_cast<std::int32_t>(words.number()),
                                             static_cast<std::int32_t>(words.number())};
    std::array<sluice_code, 2> codes{};
    return sluice_engine_step(engine(), both.data(), tokens.data(), 2, nullptr, 0, codes.data());
  }
  sluice_code generate(Words& words) {
    auto* const session = at(sessions_, words);
    const std::vector<std::int32_t> prompt = words.tokens();
    sluice_sampling sampling = sampling_of(words);
    const char* const stop = words.text();
    sampling.stop = &stop;
    sampling.stop_count = stop != nullptr ? 1 : 0;
    sluice_generate_options options{};
    options.size = sizeof options;
    options.sampling = &sampling;
    options.constraint = maybe(constraints_, words);
    options.cancel = maybe(cancels_, words);
    options.lookup_drafts = static_cast<std::int32_t>(words.number());
    Buffer<std::int32_t> answer(sampling.max_tokens);
    sluice_generate_result result{};
    result.size = sizeof result;
    return sluice_generate(session, prompt.data(), prompt.size(), &options, answer.data(),
                           answer.capacity(), &result);
  }
  sluice_code new_cancel(Words& /*words*/) {
    sluice_cancel* cancel = nullptr;
    const sluice_code code = sluice_cancel_create(&cancel);
    return made(cancels_, cancel, code);
  }
  sluice_code new_constraint(Words& words) {
    const auto kind = static_cast<sluice_constraint_kind>(words.number());
    const char* const text = words.text();
    const std::size_t bytes = text != nullptr ? std::string_view(text).size() : 0;
    sluice_constraint* constraint = nullptr;
    const sluice_code code = sluice_constraint_create(engine(), kind, text, bytes, &constraint);
    return made(constraints_, constraint, code);
  }
  sluice_code open_batcher(Words& words) {
    sluice_batcher_options options{};
    options.size = sizeof options;
    options.context = words.number();
    options.running = static_cast<std::int32_t>(words.number());
    options.no_prefix_cache = 1;
    options.queued = words.number();
    if (options.context > 1024 || options.running > 16 || batchers_.size() > 2) return refuse();
    sluice_batcher* batcher = nullptr;
    const sluice_code code = sluice_batcher_open(engine(), &options, &batcher);
    return made(batchers_, batcher, code);
  }
  sluice_code submit(Words& words) {
    auto* const batcher = at(batchers_, words);
    const std::vector<std::int32_t> prompt = words.tokens();
    const sluice_sampling sampling = sampling_of(words);
    sluice_request request{};
    request.size = sizeof request;
    request.prompt = prompt.data();
    request.prompt_count = prompt.size();
    request.sampling = &sampling;
    request.choices = static_cast<std::int32_t>(words.number());
    request.timeout_ms = words.number();
    request.constraint = maybe(constraints_, words);
    sluice_stream* stream = nullptr;
    const sluice_code code = sluice_batcher_submit(batcher, &request, &stream);
    return made(streams_, stream, code);
  }
  sluice_code next(Words& words) {
    auto* const stream = at(streams_, words);
    sluice_piece piece{};
    piece.size = sizeof piece;
    const sluice_code code =
        sluice_stream_next(stream, std::min<std::int64_t>(words.number(), 20), &piece);
    if (code == SLUICE_OK && piece.state == SLUICE_PIECE) {
      require(!invalid_utf8_at({piece.text, piece.text_bytes}), "a piece is UTF-8");
    }
    return code;
  }
  sluice_code encode(Words& words) {
    const auto how = static_cast<sluice_encoding>(words.number());
    const char* const text = words.text();
    const std::size_t bytes = text != nullptr ? std::string_view(text).size() : 0;
    Buffer<std::int32_t> ids(words.number());
    std::size_t count = 0;
    return sluice_encode(engine(), text, bytes, how, ids.data(), ids.capacity(), &count);
  }
  sluice_code to_text(Words& words) {
    const std::vector<std::int32_t> ids = words.tokens();
    Buffer<char> text(words.number());
    std::size_t bytes = 0;
    return sluice_decode(engine(), ids.data(), ids.size(), 1, text.data(), text.capacity(), &bytes);
  }

  sluice_code open_cache(Words& words) {
    sluice_kv_options options{};
    options.size = sizeof options;
    options.layers = kLayers;
    options.query_heads = 4;
    options.kv_heads = 2;
    options.head_dim = 64;
    options.rows = SLUICE_F32;
    options.context = words.number();
    options.threads = 1;
    options.sequences = static_cast<std::int32_t>(words.number());
    const char* const policy = words.text();
    options.policies = policy != nullptr ? &policy : nullptr;
    options.policy_count = policy != nullptr ? 1 : 0;
    if (options.context > 1024 || options.sequences > 16) return refuse();
    sluice_kv_cache* cache = nullptr;
    const sluice_code code = sluice_kv_cache_open(&options, &cache);
    return made(caches_, cache, code);
  }
  sluice_code begin_step(Words& words) {
    auto* const sequence = at(sequences_, words);
    const auto phase = static_cast<sluice_phase>(words.number());
    sluice_kv_step* step = nullptr;
    const sluice_code code = sluice_kv_step_begin(sequence, phase, words.number(), &step);
    return made(steps_, step, code);
  }
  // Arrays of `tokens` rows; those of a step of another length are refused.
  sluice_code append(Words& words) {
    auto* const step = at(steps_, words);
    const auto layer = static_cast<std::int32_t>(words.number());
    std::vector<float> rows = floats(words.number(), 2);
    const sluice_array array = array_of(rows);
    return sluice_kv_step_append(step, layer, &array, &array);
  }
  sluice_code attend(Words& words) {
    auto* const step = at(steps_, words);
    const auto layer = static_cast<std::int32_t>(words.number());
    std::vector<float> queries = floats(words.number(), 4);
    std::vector<float> results(queries.size());
    const sluice_array in = array_of(queries);
    const sluice_array out = array_of(results);
    return sluice_kv_step_attend(step, layer, &in, &out, nullptr, 0);
  }

  static std::vector<float> floats(std::int64_t tokens, std::size_t heads) {
    const auto rows = static_cast<std::size_t>(std::clamp<std::int64_t>(tokens, 0, 64));
    std::vector<float> all(rows * heads * 64);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = 0.1f * static_cast<float>(i % 17);
    return all;
  }
  static sluice_array array_of(std::vector<float>& from) {
    sluice_array array{};
    array.size = sizeof array;
    array.data = from.data();
    array.bytes = from.size() * sizeof(float);
    array.dtype = SLUICE_F32;
    return array;
  }
  static sluice_sampling sampling_of(Words& words) {
    sluice_sampling sampling{};
    sampling.size = sizeof sampling;
    sampling.max_tokens = static_cast<std::int32_t>(std::min<std::int64_t>(words.number(), 24));
    sampling.temperature = static_cast<double>(words.number()) / 10.0;
    sampling.top_k = static_cast<std::int32_t>(words.number());
    sampling.seed = 5;
    return sampling;
  }
  // For sizes that are valid, but take long.
  static sluice_code refuse() { return sluice_engine_free(nullptr); }

  static const std::map<std::string_view, Call>& calls();

  std::vector<sluice_session*> sessions_;
  std::vector<sluice_cancel*> cancels_;
  std::vector<sluice_constraint*> constraints_;
  std::vector<sluice_batcher*> batchers_;
  std::vector<sluice_stream*> streams_;
  std::vector<sluice_kv_cache*> caches_;
  std::vector<sluice_kv_sequence*> sequences_;
  std::vector<sluice_kv_step*> steps_;
};

const std::map<std::string_view, Caller::Call>& Caller::calls() {
  static const std::map<std::string_view, Call> calls = {
      {"session", &Caller::open_session},
      {"fork", &Caller::make<sluice_session_fork, &Caller::sessions_, &Caller::sessions_>},
      {"sibling", &Caller::make<sluice_session_sibling, &Caller::sessions_, &Caller::sessions_>},
      {"free_session", &Caller::with<sluice_session_free, &Caller::sessions_>},
      {"prefill", &Caller::prefill},
      {"recompute", &Caller::recompute},
      {"decode", &Caller::decode},
      {"score", &Caller::score},
      {"use", &Caller::with_text<sluice_session_use, &Caller::sessions_>},
      {"truncate", &Caller::with_number<sluice_session_truncate, &Caller::sessions_>},
      {"load", &Caller::with_text<sluice_session_load, &Caller::sessions_>},
      {"tokens", &Caller::tokens},
      {"ledger", &Caller::ledger},
      {"step", &Caller::step},
      {"generate", &Caller::generate},
      {"cancel", &Caller::new_cancel},
      {"set_cancel", &Caller::with<sluice_cancel_set, &Caller::cancels_>},
      {"free_cancel", &Caller::with<sluice_cancel_free, &Caller::cancels_>},
      {"constraint", &Caller::new_constraint},
      {"free_constraint", &Caller::with<sluice_constraint_free, &Caller::constraints_>},
      {"batcher", &Caller::open_batcher},
      {"free_batcher", &Caller::with<sluice_batcher_free, &Caller::batchers_>},
      {"submit", &Caller::submit},
      {"next", &Caller::next},
      {"cancel_stream", &Caller::with<sluice_stream_cancel, &Caller::streams_>},
      {"free_stream", &Caller::with<sluice_stream_free, &Caller::streams_>},
      {"encode", &Caller::encode},
      {"text", &Caller::to_text},
      {"cache", &Caller::open_cache},
      {"free_cache", &Caller::with<sluice_kv_cache_free, &Caller::caches_>},
      {"sequence", &Caller::make<sluice_kv_sequence_open, &Caller::caches_, &Caller::sequences_>},
      {"fork_sequence",
       &Caller::make<sluice_kv_sequence_fork, &Caller::sequences_, &Caller::sequences_>},
      {"reset_sequence", &Caller::with<sluice_kv_sequence_reset, &Caller::sequences_>},
      {"cut_sequence", &Caller::with_number<sluice_kv_sequence_truncate, &Caller::sequences_>},
      {"free_sequence", &Caller::with<sluice_kv_sequence_free, &Caller::sequences_>},
      {"begin", &Caller::begin_step},
      {"append", &Caller::append},
      {"attend", &Caller::attend},
      {"end", &Caller::with<sluice_kv_step_end, &Caller::steps_>},
      {"free_step", &Caller::with<sluice_kv_step_free, &Caller::steps_>},
  };
  return calls;
}

}  // namespace

Answer answer(std::string_view input, const std::filesystem::path& /*folder*/) {
  Caller caller;
  Answer answer{.accepted = true, .text = ""};
  for (int i = 0; i < kMostCalls && !input.empty(); ++i) {
    const std::size_t end = std::min(input.find('\n'), input.size());
    const std::string_view line = input.substr(0, end);
    input.remove_prefix(std::min(end + 1, input.size()));
    const sluice_code code = caller.run(line);
    answer.accepted &= code == SLUICE_OK;
    answer.text += static_cast<char>('a' + code + 1);
  }
  return answer;
}

}  // namespace sluice::fuzz
