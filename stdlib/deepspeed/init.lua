-- dt.deepspeed{ config = "ds.json", model =, loss =, data =, ... }: a job whose batch, optimizer, schedule, precision, clipping
-- and ZeRO stage come from a DeepSpeed configuration. What it says is honoured or refused by name (docs/ported.md lists
-- every key); a key that only tunes what dtrain decides itself is named in one note at the start of the run.
local cli = require "dtrain.cli"
local core = require "dtrain.core"
local jobs = require "dtrain.job"
local read = require "dtrain.deepspeed.read"
local strategies = require "dtrain.strategy"
local util = require "dtrain.util"

local optimizer_of = require "dtrain.deepspeed.optimizer"
local schedule_of = require "dtrain.deepspeed.schedule"

local number, count, flag, object = { "nonnegative" }, { "count" }, { "boolean" }, { "object" }
local function refuse(kind, is, text) return { kind, is = is, refuse = text } end
local function same(kind, is) return { kind, is = is, same = "" } end
local function off(t) return t.enabled ~= true end -- { "enabled": false, ... }
local function empty(t) return next(t) == nil end

local top = {
  train_batch_size = count, train_micro_batch_size_per_gpu = count, gradient_accumulation_steps = count,
  optimizer = object, scheduler = object, fp16 = object, bf16 = object, bfloat16 = "bf16",
  zero_optimization = { "any" }, gradient_clipping = number, steps_per_print = { "positive" },
  wall_clock_breakdown = flag, communication_data_type = { "string" },
  prescale_gradients = refuse("boolean", false, "gradients are summed in f32 and divided once; leave it out"),
  gradient_predivide_factor = refuse("number", 1, "gradients are summed in f32 and divided once; leave it out"),
  sparse_gradients = refuse("boolean", false, "embedding gradients are dense here; leave it out"),
  amp = refuse("object", off, "Apex isn't there; write \"fp16\" or \"bf16\""),
  activation_checkpointing = refuse("object", function(t)
    for _, v in util.sorted(t) do if v and v ~= core.null then return false end end
    return true
  end, "write parallel = { recompute = ... } in the script instead"),
  flops_profiler = refuse("object", off, "dtrain plan script.lua prints the operations of a step; leave it out"),
  comms_logger = refuse("object", off, "dtrain explain script.lua lists every collective; leave it out"),
  tensorboard = refuse("object", off, "--out DIR writes metrics.jsonl; leave it out"),
  wandb = refuse("object", off, "--out DIR writes metrics.jsonl; leave it out"),
  csv_monitor = refuse("object", off, "--out DIR writes metrics.jsonl; leave it out"),
  comet = refuse("object", off, "--out DIR writes metrics.jsonl; leave it out"),
  elasticity = refuse("object", off, "train_batch_size is shared by whatever ranks there are; leave it out"),
  autotuning = refuse("object", off, "dtrain plan --ranks N shows memory without a run; leave it out"),
  compression_training = refuse("object", empty, "isn't there; leave it out"),
  curriculum_learning = refuse("object", off, "order the data in the script instead (data.tensors with order =)"),
  data_efficiency = refuse("object", off, "order the data in the script instead (data.tensors with order =)"),
  progressive_layer_drop = refuse("object", off, "a graph is static here; leave it out"),
  eigenvalue = refuse("object", off, "isn't there; leave it out"),
  quantize_training = refuse("object", off, "isn't there; leave it out"),
  sparse_attention = refuse("object", empty, "isn't there; write the mask in the model"),
  hybrid_engine = refuse("object", off, "isn't there; leave it out"),
  aio = refuse("object", empty, "nothing is offloaded to disks; leave it out"),
  nebula = refuse("object", off, "checkpoint = { dir = ... } in the script; leave it out"),
  tensor_parallel = refuse("object", empty, "write parallel = { tensor = ... } in the script"),
  pipeline = refuse("object", empty, "write parallel = { pipeline = ... } in the script"),
  dump_state = refuse("boolean", false, "--verbose shows model and memory; leave it out"),
  memory_breakdown = refuse("boolean", false, "dtrain plan script.lua shows it to the byte; leave it out"),
  dataloader_drop_last = refuse("boolean", false, "each sample counts once an epoch here; leave it out"),
  disable_allgather = refuse("boolean", false, "isn't there; leave it out"),
  data_types = refuse("object", function(t) return t.grad_accum_dtype == nil or t.grad_accum_dtype == "fp32" end,
    "gradients are added in fp32; write \"fp32\" or leave it out"),
  checkpoint = same("object", empty), zero_allow_untested_optimizer = same("boolean", false),
  zero_force_ds_cpu_optimizer = same("boolean", false), graph_harvesting = same("boolean", false),
  seq_parallel_comm_data_type = refuse("string", "fp32", "sums go in fp32; leave it out"),
  use_data_before_expert_parallelism = refuse("boolean", false, "isn't there; leave it out"),
}

local fp16 = {
  enabled = flag, loss_scale = number, initial_scale_power = { "integer" }, loss_scale_window = count, hysteresis = count,
  min_loss_scale = { "positive" }, auto_cast = same("boolean", true), fused_mode = same("boolean", true),
  consecutive_hysteresis = refuse("boolean", false, "hysteresis is refilled when the scale grows; write false"),
  fp16_master_weights_and_grads = refuse("boolean", false, "master weights are f32; write false"),
}
local bf16 = {
  enabled = flag, immediate_grad_update = same("boolean", nil),
  check_grad_overflow = refuse("boolean", false, "a value that isn't finite ends a bf16 run with its place; write false"),
  bf16_master_weights_and_grads = refuse("boolean", false, "master weights are f32; write false"),
  bf16_optimizer_states = refuse("boolean", false, "optimizer states are f32; write false"),
}

local offload = refuse("object", function(t) return t.device == nil or t.device == "none" end,
  "nothing is offloaded; a higher stage, more ranks or recomputation save memory, dtrain plan shows how much")
local no_offload = refuse("boolean", false, offload.refuse)
local quantised = refuse("boolean", false, "isn't there; parallel = { gradient = { dtype = \"bf16\" } } halves what gradients send")
local zero = {
  stage = { "integer" }, reduce_bucket_size = { "positive" }, offload_optimizer = offload, offload_param = offload,
  cpu_offload = no_offload, cpu_offload_param = no_offload, cpu_offload_use_pin_memory = no_offload,
  overlap_comm = same("boolean", true), contiguous_gradients = same("boolean", true), reduce_scatter = same("boolean", true),
  allgather_partitions = same("boolean", true), allgather_bucket_size = same("number"), sub_group_size = same("number"),
  use_multi_rank_bucket_allreduce = same("boolean", true), round_robin_gradients = same("boolean", false),
  load_from_fp32_weights = same("boolean", true), ignore_unused_parameters = same("boolean", true),
  prefetch_bucket_size = same("number"), param_persistence_threshold = number,
  model_persistence_threshold = same("number"), max_live_parameters = same("number"), max_reuse_distance = same("number"),
  module_granularity_threshold = same("number"), gather_16bit_weights_on_model_save = same("boolean", false),
  memory_efficient_linear = same("boolean", true), override_module_apply = same("boolean", true),
  stage3_gather_fp16_weights_on_model_save = "gather_16bit_weights_on_model_save",
  elastic_checkpoint = refuse("boolean", false, "checkpoints of any number of ranks are the same here; leave it out"),
  legacy_stage1 = refuse("boolean", false, "isn't there; leave it out"),
  zero_hpz_partition_size = refuse("number", 1, "isn't there; write 1"),
  mics_shard_size = refuse("number", -1, "isn't there; leave it out"),
  mics_hierarchical_params_gather = refuse("boolean", false, "isn't there; leave it out"),
  zero_quantized_weights = quantised, zero_quantized_gradients = quantised, zero_quantized_nontrainable_weights = quantised,
  zeropp_loco_param = refuse("object", empty, quantised.refuse), zenflow = refuse("object", empty, offload.refuse),
  leaf_module = refuse("object", empty, "parameters are gathered by bucket; leave it out"),
}
for _, key in ipairs { "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold",
  "max_live_parameters", "max_reuse_distance", "module_granularity_threshold", "gather_16bit_weights_on_model_save" } do
  zero["stage3_" .. key] = key
end

--- train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks of the data axis: two of the three
--- give the third, one alone means no accumulation. Returns the global and the micro batch.
local function solve(reader, o, ranks)
  local train, micro, steps = o.train_batch_size, o.train_micro_batch_size_per_gpu, o.gradient_accumulation_steps
  if not train and not micro then
    reader:fail("", "needs train_batch_size or train_micro_batch_size_per_gpu; it has %s",
      steps and "gradient_accumulation_steps alone" or "neither")
  end
  local equation = "train_batch_size %s = micro batch %s x accumulation %s x %d data-parallel rank%s"
  local function fail(fix, ...)
    reader:fail("", (equation .. " does not hold; " .. fix):format(train or "?", micro or "?", steps or "?", ranks,
      ranks == 1 and "" or "s", ...))
  end
  if train and micro and not steps then
    if train % (micro * ranks) ~= 0 then
      local low = train // (micro * ranks) * micro * ranks
      fail("train_batch_size %s%d would do", low > 0 and low .. " or " or "", low + micro * ranks)
    end
    steps = train // (micro * ranks)
  elseif train and not micro then
    steps = steps or 1
    if train % (steps * ranks) ~= 0 then
      local low = train // (steps * ranks) * steps * ranks
      fail("train_batch_size %s%d would do", low > 0 and low .. " or " or "", low + steps * ranks)
    end
    micro = train // (steps * ranks)
  elseif not train then
    steps = steps or 1
    train = micro * steps * ranks
  elseif train ~= micro * steps * ranks then
    local fixes = { ("train_batch_size %d"):format(micro * steps * ranks) }
    if train % (micro * ranks) == 0 then
      fixes[#fixes + 1] = ("gradient_accumulation_steps %d"):format(train // (micro * ranks))
    end
    if train % (steps * ranks) == 0 then
      fixes[#fixes + 1] = ("train_micro_batch_size_per_gpu %d"):format(train // (steps * ranks))
    end
    if train % (micro * steps) == 0 then fixes[#fixes + 1] = ("%d ranks"):format(train // (micro * steps)) end
    fail("%s would do", table.concat(fixes, " or "))
  end
  return train, micro
end

local function precision_of(reader, o)
  local f, b = reader:object("fp16", o.fp16 or {}, fp16), reader:object("bf16", o.bf16 or {}, bf16)
  if f.enabled and b.enabled then reader:fail("fp16", "is enabled and bf16 too; enable one") end
  if b.enabled then return "bf16" end
  if not f.enabled then return nil end
  if (f.loss_scale or 0) > 0 then return { dtype = "f16", loss_scale = f.loss_scale } end
  return { dtype = "f16", loss_scale = { initial = 2.0 ^ (f.initial_scale_power or 16), window = f.loss_scale_window,
    hysteresis = f.hysteresis, min = f.min_loss_scale } }
end

local wires = { fp32 = "f32", fp16 = "f16", bf16 = "bf16", bfp16 = "bf16" }

-- What the configuration says about `parallel`, added to what the script says.
local function parallel_of(reader, o, given)
  local p = util.copy(given or {})
  local z = o.zero_optimization
  if type(z) == "boolean" then z = { stage = z and 1 or 0 } end
  z = reader:object("zero_optimization", z or {}, zero)
  local stage = z.stage or 0
  if stage < 0 or stage > 3 then reader:fail("zero_optimization.stage", "is %d; 0, 1, 2 and 3 work", stage) end
  if stage > 0 then
    if p.zero and p.zero ~= stage then
      reader:fail("zero_optimization.stage", "is %d, but the script says parallel = { zero = %s }; say it once", stage,
        tostring(p.zero))
    end
    p.zero = math.tointeger(stage)
  end
  local small = z.param_persistence_threshold -- parameters of fewer elements stay whole, with stage 3
  if small and stage == 3 and not p.resident then p.resident = math.tointeger(math.min(small, 2 ^ 53) // 1) end
  if small and stage ~= 3 then reader.same[#reader.same + 1] = "zero_optimization.param_persistence_threshold" end
  local wire = o.communication_data_type
  if wire and wire ~= "none" and not wires[wire] then
    reader:fail("communication_data_type", "%s is unknown; %s", wire, util.suggest(wire, util.keys(wires)))
  end
  wire = wires[wire]
  if wire or z.reduce_bucket_size then
    local g = util.copy(p.gradient or {})
    g.dtype = g.dtype or wire
    if z.reduce_bucket_size and not g.bucket_mb then -- elements, each of 4 bytes where gradients are added
      g.bucket_mb = z.reduce_bucket_size * 4 / 1048576
      g.first_bucket_mb = g.first_bucket_mb or math.min(1, g.bucket_mb)
    end
    p.gradient = g
  end
  return p
end

--- dt.deepspeed{ config = path or table, any key of dt.job that the configuration doesn't set } -> job.
return function(given)
  if type(given) ~= "table" then util.fail("dt.deepspeed wants a table, got %s; write dt.deepspeed { config = \"ds.json\", "
    .. "model = ..., loss = ..., data = ... }", util.show(given)) end
  local config = given.config
  if type(config) ~= "string" and type(config) ~= "table" then
    util.fail("dt.deepspeed: config wants a file's name or a table, got %s", util.show(config))
  end
  local reader = read.new(type(config) == "string" and config or "dt.deepspeed: config")
  if type(config) == "string" then config = core.json(config) end
  local o = reader:object("", config, top)

  local spec = util.copy(given)
  spec.config = nil
  local function set(key, from, value)
    if value == nil then return end
    if spec[key] ~= nil then
      util.fail("dt.deepspeed: %s is given in the script and as %s in %s; leave one out", key, from, reader.path)
    end
    spec[key] = value
  end
  spec.parallel = parallel_of(reader, o, given.parallel)
  local mesh = strategies.new(cli.parallel(spec.parallel)):mesh(cli.world())
  local _, ranks = strategies.among(mesh, 0, "samples")
  local train, micro = solve(reader, o, ranks)
  set("batch", "train_batch_size", { global = train, micro = micro })
  if o.optimizer then set("optimizer", "optimizer", optimizer_of(reader, o.optimizer)) end
  if o.scheduler then
    if not spec.optimizer then reader:fail("scheduler", "needs an optimizer, here or in the script") end
    set("schedule", "scheduler", schedule_of(reader, o.scheduler, spec.optimizer))
  end
  set("precision", "fp16 or bf16", precision_of(reader, o))
  if (o.gradient_clipping or 0) > 0 then set("clip", "gradient_clipping", o.gradient_clipping) end
  if o.steps_per_print then set("log_every", "steps_per_print", math.max(1, math.tointeger(o.steps_per_print // 1))) end
  if o.wall_clock_breakdown then set("profile", "wall_clock_breakdown", true) end
  local job = jobs.job(spec)
  job.report_every = spec.log_every -- also in a loop of one's own
  if #reader.same > 0 then
    job.notes = { ("%s: %s: nothing to tune here, dtrain plans this itself"):format(reader.path,
      table.concat(reader.same, ", ")) }
  end
  return job
end
