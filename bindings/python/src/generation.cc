// Session.generate as an iterator: a thread generates, and the iterator waits for text without the
// GIL, looking for signals ten times a second, so that Ctrl-C ends it cleanly.
#include <nanobind/stl/variant.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <thread>

#include "bindings/python/src/common.h"
#include "sluice/generate.h"

namespace sluice::python {
namespace {

constexpr std::chrono::milliseconds kBetweenSignals{100};

class Generation {
 public:
  // Begins once the session is this generation's. Throws Error{usage} if another thread uses it.
  // `looks_up`: takes drafts from the context.
  Generation(std::shared_ptr<PySession> session, Tokens prompt, GenerateOptions options,
             bool looks_up)
      : session_(std::move(session)), prompt_(std::move(prompt)), options_(std::move(options)) {
    if (looks_up) options_.drafter = &lookup_;
    options_.interrupt = [this] { return stop_.load(); };
    options_.on_text = [this](std::string_view text) { put(text); };
    thread_ = std::thread([this] { run(); });
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return has_begun_; });
    if (!is_in_use_) return;
    lock.unlock();
    thread_.join();
    std::rethrow_exception(error_);
  }
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;
  ~Generation() { close(); }

  // Ends the generation after its current step, and waits for that.
  void close() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }

  // The next text, or none after the last; none, too, and `waits`, after kBetweenSignals.
  std::optional<std::string> next(bool& waits) {
    std::unique_lock lock(mutex_);
    const bool has_news =
        changed_.wait_for(lock, kBetweenSignals, [&] { return !pieces_.empty() || has_ended_; });
    waits = !has_news;
    if (!pieces_.empty()) {
      std::string piece = std::move(pieces_.front());
      pieces_.pop_front();
      return piece;
    }
    if (has_ended_ && error_ != nullptr) std::rethrow_exception(error_);
    return std::nullopt;
  }

  // None until the end.
  std::optional<GenerateResult> result() {
    const std::lock_guard lock(mutex_);
    if (!has_ended_ || error_ != nullptr) return std::nullopt;
    return result_;
  }

 private:
  void put(std::string_view text) {
    {
      const std::lock_guard lock(mutex_);
      pieces_.emplace_back(text);
    }
    changed_.notify_all();
  }

  void begin(bool is_in_use) {
    {
      const std::lock_guard lock(mutex_);
      has_begun_ = true;
      is_in_use_ = is_in_use;
    }
    changed_.notify_all();
  }

  void run() {
    GenerateResult made;
    std::exception_ptr error;
    try {
      const Use use(session_->owner, "Session");
      begin(false);
      made = sluice::generate(session_->engine->engine, session_->session, prompt_, options_);
    } catch (...) {
      error = std::current_exception();
    }
    {
      const std::lock_guard lock(mutex_);
      is_in_use_ = !has_begun_;
      has_begun_ = true;
      has_ended_ = true;
      result_ = std::move(made);
      error_ = error;
    }
    changed_.notify_all();
  }

  std::shared_ptr<PySession> session_;
  Tokens prompt_;
  GenerateOptions options_;
  LookupDrafter lookup_;
  std::atomic<bool> stop_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::string> pieces_;
  bool has_begun_ = false;
  bool is_in_use_ = false;  // by another thread, so that nothing was begun
  bool has_ended_ = false;
  GenerateResult result_;
  std::exception_ptr error_;
  std::thread thread_;
};

std::string next_text(Generation& self) {
  while (true) {
    std::optional<std::string> text;
    bool waits = false;
    {
      const Released unlocked;
      text = self.next(waits);
    }
    if (text) return *text;
    if (!waits) throw nb::stop_iteration();
    check_signals();
  }
}

std::shared_ptr<Generation> generate(const std::shared_ptr<PySession>& session,
                                     const std::variant<std::string, Tokens>& prompt,
                                     int max_tokens, double temperature, int top_k, double top_p,
                                     double min_p, double repetition_penalty, std::uint64_t seed,
                                     const std::vector<std::string>& stop, Tokens end_tokens,
                                     bool ignore_eos, Tokens history, int lookup_drafts,
                                     const std::shared_ptr<PyConstraint>& constraint) {
  GenerateOptions options;
  options.sampling =
      sampling_of(max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop);
  options.sampling.validate();
  options.end_tokens = std::move(end_tokens);
  options.ignore_eos = ignore_eos;
  options.history = std::move(history);
  options.constraint = constraint_of(constraint, *session->engine);
  if (lookup_drafts != 0) options.drafts = lookup_drafts;
  const auto* const text = std::get_if<std::string>(&prompt);
  Tokens tokens =
      text != nullptr ? session->engine->engine.encode_prompt(*text) : std::get<Tokens>(prompt);
  return make_owned<Generation>(session, std::move(tokens), std::move(options), lookup_drafts != 0);
}

nb::object timings_of(Generation& self) {
  const auto result = self.result();
  if (!result) return nb::none();
  nb::dict dict;
  dict["recomputed_tokens"] = result->recomputed_tokens;
  dict["prefill_seconds"] = result->timings.prefill_seconds;
  dict["prefill_tokens"] = result->timings.prefill_tokens;
  dict["first_token_seconds"] = result->timings.first_token_seconds;
  dict["decode_seconds"] = result->timings.decode_seconds;
  dict["decode_tokens"] = result->timings.decode_tokens;
  dict["drafted"] = result->drafts.drafted;
  dict["accepted"] = result->drafts.accepted;
  return dict;
}

}  // namespace

void bind_generation(nb::module_& module) {
  nb::class_<Generation>(module, "Generation",
                         "An iterator over the text of an answer as it is generated. The session "
                         "is in use until it ends, or close() ends it.")
      .def("__iter__", [](const std::shared_ptr<Generation>& self) { return self; })
      .def("__next__", &next_text)
      .def("close", &Generation::close, Unlocked(), "Ends it after its current step.")
      .def_prop_ro(
          "text",
          [](Generation& self) -> std::optional<std::string> {
            const auto result = self.result();
            return result ? std::optional(result->text) : std::nullopt;
          },
          "The whole text; None until the end, as are the others.")
      .def_prop_ro("tokens",
                   [](Generation& self) -> std::optional<Tokens> {
                     const auto result = self.result();
                     return result ? std::optional(result->tokens) : std::nullopt;
                   })
      .def_prop_ro(
          "finish_reason",
          [](Generation& self) -> std::optional<std::string> {
            const auto result = self.result();
            if (!result) return std::nullopt;
            return std::string(to_string(result->reason));
          },
          "end_of_text, stop_string, max_tokens or interrupted.")
      .def_prop_ro(
          "pending",
          [](Generation& self) -> std::optional<TokenId> {
            const auto result = self.result();
            return result ? result->pending : std::nullopt;
          },
          "Drawn but not appended: the next prompt has to begin with it.")
      .def_prop_ro("timings", &timings_of, nb::sig("def timings(self) -> dict | None"));
}

void bind_generate(nb::class_<PySession>& session) {
  session.def(
      "generate", &generate, nb::arg("prompt"), nb::kw_only(), nb::arg("max_tokens") = 128,
      nb::arg("temperature") = 0.0, nb::arg("top_k") = 0, nb::arg("top_p") = 1.0,
      nb::arg("min_p") = 0.0, nb::arg("repetition_penalty") = 1.0, nb::arg("seed") = 0,
      nb::arg("stop") = std::vector<std::string>(), nb::arg("end_tokens") = Tokens(),
      nb::arg("ignore_eos") = false, nb::arg("history") = Tokens(), nb::arg("lookup_drafts") = 0,
      nb::arg("constraint") = nb::none(), Unlocked(),
      "Generates after a prompt, text or ids; the session needs room for both. "
      "lookup_drafts: most tokens of a step that are guessed from the context, 0 to 63; the "
      "text stays the same, and the session needs a decode_batch of one more. constraint: what "
      "the text has to be, from Engine.constraint.");
}

}  // namespace sluice::python
