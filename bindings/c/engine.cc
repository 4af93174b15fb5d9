// Engine and text.
#include <string>
#include <utility>

#include "bindings/c/call.h"
#include "bindings/c/objects.h"
#include "bindings/c/session_options.h"
#include "sluice/format_names.h"

namespace sluice::c {
namespace {

EngineConfig config_of(const sluice_engine_options& from) {
  EngineConfig config;
  config.model = need(from.model, "model");
  config.device = string_or(from.device, "cpu");
  if (from.compute != nullptr) config.compute = parse_dtype(from.compute, "compute");
  if (from.weights != nullptr) config.weights = parse_weight_code(from.weights, "weights");
  if (from.kv_dtype != nullptr) config.kv_dtype = parse_row_format(from.kv_dtype, "kv_dtype");
  config.threads = from.threads;
  config.chunk = from.chunk;
  config.device_memory = set(from.device_memory);
  config.host_memory = set(from.host_memory);
  if (from.row_cache != nullptr) config.row_cache = *from.row_cache;
  config.disk = disk(from.disk, from.disk_count, from.disk_bytes);
  if (from.host_attention != nullptr) config.host_attention = *from.host_attention;
  return config;
}

std::vector<TokenId> encoded(const Engine& engine, std::string_view text,
                             sluice_encoding encoding) {
  switch (encoding) {
    case SLUICE_ENCODE:
      return engine.tokenizer().encode(text);
    case SLUICE_ENCODE_PROMPT:
      return engine.encode_prompt(text);
    case SLUICE_ENCODE_PLAIN:
      return engine.tokenizer().encode_plain(text);
    default:
      refuse("no such sluice_encoding");
  }
}

// Calls `use` with the engine's chat template.
void with_format(EngineObject& object, const auto& use) {
  const std::lock_guard lock(object.mutex);
  if (!object.format) {
    object.format = ChatFormat::load(object.model, object.engine.tokenizer());
  }
  use(*object.format);
}

}  // namespace

SessionOptions session_options(const Engine& engine, const sluice_session_options* options) {
  const sluice_session_options from = read(options, "options");
  SessionOptions to;
  to.context = from.context;
  to.policies = policies(from.policies, from.policy_count,
                         [&](const char* text) { return engine.policy(text); });
  if (from.decode_batch != 0) to.decode_batch = from.decode_batch;
  if (from.sequences != 0) to.sequences = from.sequences;
  to.tokens = from.tokens;
  to.device_memory = set(from.device_memory);
  to.host_memory = set(from.host_memory);
  to.loads = from.loads != 0;
  to.indexed_tokens = from.indexed_tokens;
  return to;
}

}  // namespace sluice::c

using namespace sluice::c;  // NOLINT(google-build-using-namespace)

sluice_code sluice_cancel_create(sluice_cancel** cancel) {
  return call([&] {
    *need(cancel, "cancel") = add<CancelObject, sluice_cancel>(std::make_shared<CancelObject>());
  });
}

sluice_code sluice_cancel_set(sluice_cancel* cancel) {
  return call([&] { find<CancelObject>(cancel)->is_set = true; });
}

sluice_code sluice_cancel_free(sluice_cancel* cancel) {
  return call([&] { take<CancelObject>(cancel); });
}

sluice_code sluice_engine_open(const sluice_engine_options* options, sluice_engine** engine) {
  return call([&] {
    need(engine, "engine");
    const sluice::EngineConfig config = config_of(read(options, "options"));
    auto object = std::make_shared<EngineObject>(sluice::Engine::open(config), config.model);
    *engine = add<EngineObject, sluice_engine>(std::move(object));
  });
}

sluice_code sluice_engine_free(sluice_engine* engine) {
  return call([&] { take<EngineObject>(engine); });
}

sluice_code sluice_engine_load_weights(sluice_engine* engine, sluice_share_callback on_share,
                                       void* user) {
  return call([&] {
    find<EngineObject>(engine)->engine.load_weights([&](double share) {
      if (on_share != nullptr && on_share(user, share) != 0) {
        throw Ending{SLUICE_STOPPED, "the callback stopped loading"};
      }
    });
  });
}

sluice_code sluice_engine_info(sluice_engine* engine, sluice_model_info* info) {
  return call([&] {
    const auto object = find<EngineObject>(engine);
    require_struct(info, "info");
    const sluice::ModelInfo& from = object->engine.info();
    sluice_model_info to{};
    to.parameters = from.parameters;
    to.weight_bytes = from.weight_bytes;
    to.trained_context = from.trained_context;
    to.window = from.window.value_or(0);
    to.layers = from.kv.layers;
    to.query_heads = from.kv.query_heads;
    to.kv_heads = from.kv.kv_heads;
    to.head_dim = from.kv.head_dim;
    to.hidden = from.hidden;
    to.vocabulary = from.vocabulary;
    to.bos = from.bos.value_or(-1);
    write(info, to);
  });
}

sluice_code sluice_engine_eos(sluice_engine* engine, int32_t* tokens, size_t capacity,
                              size_t* count) {
  return call([&] { put(find<EngineObject>(engine)->engine.info().eos, tokens, capacity, count); });
}

sluice_code sluice_engine_memory(sluice_engine* engine, sluice_memory* memory) {
  return call([&] {
    const auto object = find<EngineObject>(engine);
    require_struct(memory, "memory");
    const sluice::MemoryUse use = object->engine.memory();
    write(memory, {0, use.device_bytes, use.device_peak, use.host_bytes, use.host_peak});
  });
}

sluice_code sluice_engine_plan_json(sluice_engine* engine, const sluice_session_options* options,
                                    char* json, size_t capacity, size_t* bytes) {
  return call([&] {
    const auto object = find<EngineObject>(engine);
    put(object->engine.plan(session_options(object->engine, options)).to_json(), json, capacity,
        bytes);
  });
}

sluice_code sluice_engine_policy(sluice_engine* engine, const char* policy, char* text,
                                 size_t capacity, size_t* bytes) {
  return call([&] {
    const auto object = find<EngineObject>(engine);
    put(to_string(object->engine.policy(need(policy, "policy"))), text, capacity, bytes);
  });
}

sluice_code sluice_encode(sluice_engine* engine, const char* text, size_t bytes,
                          sluice_encoding encoding, int32_t* tokens, size_t capacity,
                          size_t* count) {
  return call([&] {
    const auto object = find<EngineObject>(engine);
    const auto from = array(text, bytes, "text");
    put(encoded(object->engine, {from.data(), from.size()}, encoding), tokens, capacity, count);
  });
}

sluice_code sluice_decode(sluice_engine* engine, const int32_t* tokens, size_t count,
                          int keep_special, char* text, size_t capacity, size_t* bytes) {
  return call([&] {
    const auto object = find<EngineObject>(engine);
    const auto ids = array(tokens, count, "tokens");
    put(object->engine.tokenizer().decode(ids, keep_special != 0), text, capacity, bytes);
  });
}

sluice_code sluice_render_chat(sluice_engine* engine, const char* system, const sluice_turn* turns,
                               size_t turn_count, int32_t* tokens, size_t capacity, size_t* count) {
  return call([&] {
    const auto object = find<EngineObject>(engine);
    std::vector<sluice::ChatTurn> all;
    for (const sluice_turn& turn : array(turns, turn_count, "turns")) {
      all.push_back({need(turn.question, "question"), string_or(turn.answer, ""), {}});
    }
    with_format(*object, [&](const sluice::ChatFormat& format) {
      put(format.render(string_or(system, ""), all), tokens, capacity, count);
    });
  });
}

sluice_code sluice_chat_end_tokens(sluice_engine* engine, int32_t* tokens, size_t capacity,
                                   size_t* count) {
  return call([&] {
    with_format(*find<EngineObject>(engine), [&](const sluice::ChatFormat& format) {
      put(format.end_tokens(), tokens, capacity, count);
    });
  });
}
