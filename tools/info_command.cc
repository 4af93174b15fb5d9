#include <array>
#include <cstdio>
#include <memory>
#include <string>

#include "lib/bytes.h"
#include "sluice/engine.h"
#include "tools/commands.h"
#include "tools/flags.h"
#include "tools/generation.h"
#include "tools/model_flags.h"
#include "tools/output.h"
#include "tools/void_flags.h"

namespace sluice::tools {
namespace {

std::string labelled(const char* name, const std::string& value) {
  std::array<char, 32> label{};
  std::snprintf(label.data(), label.size(), "%-18s ", name);
  return label.data() + value + "\n";
}

std::string describe(const ModelInfo& info) {
  const KvShape& kv = info.kv;
  std::string text = labelled("architecture", info.architecture);
  const std::string dtype(to_string(info.weight_dtype));
  const bool alike =
      info.weight_bytes == static_cast<std::uint64_t>(info.parameters) * size_of(info.weight_dtype);
  text += labelled("parameters",
                   std::to_string(info.parameters) + " (" + format_bytes(info.weight_bytes) +
                       " in " + (alike ? dtype : info.stored_types) +
                       (alike || info.has_codes ? "" : ", matrices read as " + dtype) + ")");
  text += labelled("layers", std::to_string(kv.layers));
  text += labelled("hidden", std::to_string(info.hidden) + ", feed-forward " +
                                 std::to_string(info.intermediate));
  text +=
      labelled("heads", std::to_string(kv.query_heads) + " query, " + std::to_string(kv.kv_heads) +
                            " KV, head_dim " + std::to_string(kv.head_dim));
  text += labelled("vocabulary", std::to_string(info.vocabulary) +
                                     (info.tied_embeddings ? ", tied embeddings" : ""));
  text += labelled("trained context", std::to_string(info.trained_context) + " tokens");
  if (info.window) {
    text +=
        labelled("window", std::to_string(*info.window) +
                               (info.window_limits ? " tokens, which no context may exceed"
                                                   : " tokens, all that some layers attend to"));
  }
  text += labelled("row", format_bytes(kv.row_bytes()) + " per token, layer and KV head");
  text +=
      labelled("KV cache", format_bytes(kv.token_bytes()) + " per token in " + to_string(kv.rows));
  for (std::int64_t tokens : {8192, 131072, 1048576}) {
    const bool is_last = info.window_limits && tokens >= *info.window;
    if (is_last) tokens = *info.window;
    text += labelled("", format_bytes(kv.token_bytes() * static_cast<std::uint64_t>(tokens)) +
                             " at " + std::to_string(tokens) + " tokens");
    if (is_last) break;
  }
  return text;
}

}  // namespace

Command add_info(CLI::App& app) {
  const auto flags = std::make_shared<ModelFlags>();
  const auto context = std::make_shared<std::int64_t>(0);
  flags->add_to(app);
  const auto policy = std::make_shared<std::string>("dense");
  add_integer(app, "--context", *context, "also show the memory plan for this many tokens")
      ->check(not_zero());
  app.add_option("--policy", *policy,
                 "of the plan: a preset, a line or auto, see sluice generate --help")
      ->capture_default_str();
  return [flags, context, policy] {
    const Engine engine = Engine::open(flags->config());
    if (*policy != "auto") engine.policy(*policy);  // refuses a bad policy even if it is not used
    std::string text = describe(engine.info());
    if (*context == 0) {
      print_error(void_without_plan(*flags, *policy));
    } else {
      const Choice choice = choose_session(engine, *policy, {*context, {}, 1});
      const Plan plan = engine.plan(choice.options);
      text += "\n" + plan_text(engine, plan, choice);
      print_error(void_in_plan(*flags, plan, choice.options.policies.front()));
    }
    print(text);
    return 0;
  };
}

}  // namespace sluice::tools
