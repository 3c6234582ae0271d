-- dt.job: a declared training job, checked as a whole before anything is traced. Everything here is plain values;
-- what runs it is engine.lua.
local cli = require "dtrain.cli"
local data = require "dtrain.data"
local define = require "dtrain.optim.define"
local metrics = require "dtrain.metrics"
local modules = require "dtrain.nn.module"
local schedule = require "dtrain.optim.schedule"
local strategies = require "dtrain.strategy"
local util = require "dtrain.util"

local Job = { __name = "job" }
Job.__index = Job

local M = { made = {} } -- made: every job of the process, in order

function M.is(x) return getmetatable(x) == Job end

--- Jobs that no engine was made of, in order; engine.lua marks the others as taken.
function M.idle()
  local out = {}
  for _, job in ipairs(M.made) do if not job.taken then out[#out + 1] = job end end
  return out
end

local function check_batch(b)
  if type(b) == "number" then b = { global = b } end
  local o = util.options("dt.job: batch", b, { { "global", "count", required = true }, { "micro", "count" } })
  if o.micro and o.micro > o.global then
    util.fail("dt.job: batch: micro %d is more than global %d; micro is one rank's part of a step", o.micro, o.global)
  end
  return o
end

local function check_clip(c)
  if type(c) == "number" then c = { norm = c } end
  return util.options("dt.job: clip", c, { { "norm", "positive" }, { "value", "positive" } })
end

-- precision = name, or { dtype = name, loss_scale = number (fixed) | { initial =, window =, hysteresis =, min = } }:
-- returns the name and core.exec's options.
local function check_precision(p)
  local names = { "f32", "bf16", "f16" }
  if type(p) == "string" then p = { dtype = p } end
  local o = util.options("dt.job: precision", p, { { "dtype", "string", required = true, choices = names },
    { "loss_scale", "positive|table" } })
  if o.loss_scale and o.dtype ~= "f16" then
    util.fail("dt.job: precision: loss_scale is for f16; %s needs none, leave it out", o.dtype)
  end
  if type(o.loss_scale) == "number" then return o.dtype, { loss_scale = o.loss_scale, fixed_scale = true } end
  local s = util.options("dt.job: precision: loss_scale", o.loss_scale, { { "initial", "positive", 65536 },
    { "window", "count", 1000 }, { "hysteresis", "count", 2 }, { "min", "positive", 1 } })
  if s.initial < s.min then
    util.fail("dt.job: precision: loss_scale: initial %g is below min %g; start at least there", s.initial, s.min)
  end
  return o.dtype, { loss_scale = s.initial, scale_window = s.window, hysteresis = s.hysteresis, min_scale = s.min }
end

local function check_data(d)
  if data.is(d) then return { train = d:part("train") or d, valid = d:part("valid"), test = d:part("test") } end
  return util.options("dt.job: data", d, { { "train", "dataset", required = true }, { "valid", "dataset" },
    { "test", "dataset" } })
end

-- Names of all parameters of a job.
local function parameters_of(o)
  local names = {}
  for _, m in ipairs { { "", o.model }, { "loss.", o.loss } } do
    if modules.is(m[2]) then
      modules.base.each_parameter(m[2], function(name, p)
        if p.type == "param" then names[#names + 1] = m[1] .. name end
      end)
    end
  end
  return names
end

-- freeze = module or list of modules: set of parameters, all of them the job's.
local function check_freeze(o)
  local frozen, own = {}, {}
  for _, m in ipairs { o.model, o.loss } do
    if modules.is(m) then modules.base.each_parameter(m, function(_, p) own[p] = true end) end
  end
  for i, m in ipairs(modules.is(o.freeze) and { o.freeze } or o.freeze or {}) do
    if not modules.is(m) then
      util.fail("dt.job: freeze is a module or a list of modules; entry %d is %s", i, util.show(m))
    end
    modules.base.each_parameter(m, function(name, p)
      if not own[p] then
        util.fail("dt.job: freeze: the parameter '%s' of entry %d is no part of the job's model or loss", name, i)
      end
      frozen[p] = true
    end)
  end
  return frozen
end

local function field(set, name)
  for _, f in ipairs(set:fields()) do
    if f.name == name then return f end
  end
end

-- Samples of an evaluation set have what training samples have: the plans are made for those.
local function check_eval(train, eval)
  for _, f in ipairs(eval and train:fields() or {}) do
    local g = field(eval, f.name)
    if not g or g.dtype ~= f.dtype or util.show(g.shape) ~= util.show(f.shape) then
      util.fail("dt.job: eval: the evaluation set's samples have %s, training's have '%s' %s %s; give both the same fields and shapes",
        g and ("'%s' %s %s"):format(g.name, g.dtype, util.show(g.shape)) or ("no '%s'"):format(f.name), f.name, f.dtype,
        util.show(f.shape))
    end
  end
end

--- dt.job{ model =, loss =, data =, batch =, optimizer =, schedule =, precision = "f32" | "bf16" | "f16" | { dtype =,
--- loss_scale = number | { initial =, window =, hysteresis =, min = } }, clip = norm | { norm =, value = }, parallel =,
--- checkpoint = { dir =, every =, keep = }, steps = | epochs =, eval = { every =, batches =, metrics =, data = }, seed = 0,
--- device = "cpu" | "cuda" | "auto", out =, log_every =, profile =,
--- freeze = module | list of modules that this job leaves as they are,
--- compare_every = 100 steps between two comparisons of the replicas, after = function(engine) } -> job. Errors name the key and
--- the script's line.
function M.job(given)
  local o = util.options("dt.job", given, {
    { "model", "module|callable", required = true }, { "loss", "module|callable", required = true },
    { "data", "dataset|table", required = true }, { "batch", "number|table", required = true },
    { "optimizer", "optimizer", required = true }, { "schedule", "any" },
    { "precision", "string|table", "f32" }, { "clip", "positive|table", {} },
    { "parallel", "table", {} }, { "checkpoint", "table" }, { "steps", "count" }, { "epochs", "count" },
      { "eval", "table" },
    { "seed", "integer", 0 }, { "device", "string", "cpu" },
    { "out", "string" }, { "log_every", "count" }, { "profile", "boolean", false },
    { "after", "callable" }, { "freeze", "module|table" }, { "compare_every", "integer", 100 } })
  for _, key in ipairs { "model", "loss" } do
    if util.kind(o[key]) == "module class" then
      util.fail("dt.job: %s is the class %s; make an instance: %s = %s(...)", key, o[key].name, key, o[key].name)
    end
  end
  if o.device ~= "cpu" and o.device ~= "cuda" and o.device ~= "auto" then
    util.fail("dt.job: device is \"cpu\", \"cuda\" or \"auto\", got '%s'", o.device)
  end
  if o.steps and o.epochs then util.fail("dt.job has both steps and epochs; give one") end
  local self = setmetatable(o, Job)
  self.where = util.frame()
  self.frozen = check_freeze(o)
  self.batch = check_batch(o.batch)
  self.clip = check_clip(o.clip)
  self.precision, self.scaling = check_precision(o.precision)
  self.declared = o.parallel -- what the script says, before the command line
  self.parallel = strategies.new(cli.parallel(o.parallel))
  self.data = check_data(o.data)
  self.schedule = schedule.of(o.schedule)
  if not define.is(o.optimizer) then util.fail("dt.job: optimizer wants e.g. optim.AdamW { lr = 3e-4 }") end
  o.optimizer:check_groups(parameters_of(o))
  if o.checkpoint then
    self.checkpoint = util.options("dt.job: checkpoint", o.checkpoint,
      { { "dir", "string", required = true }, { "every", "count" },
      { "keep", "integer", 3 } })
    if self.checkpoint.keep < 0 then
      util.fail("dt.job: checkpoint: keep is how many checkpoints stay, 0 for all of them; got %d", self.checkpoint.keep)
    end
  end
  if not field(self.data.train, "inputs") then
    util.fail("dt.job: data has no field 'inputs'; %s", tostring(self.data.train))
  end
  local e = util.options("dt.job: eval", o.eval, { { "every", "count" }, { "batches", "count" }, { "metrics", "table" },
    { "data", "dataset" } })
  e.data = e.data or self.data.valid or self.data.test
  if o.eval and not e.data then
    util.fail("dt.job: eval needs data: a set with a split, data = { train =, valid = } or eval.data")
  end
  if e.batches and e.data then
    local n = e.batches * self.batch.global
    if n < e.data:count() then e.data = e.data:subset(0, n) end
  end
  check_eval(self.data.train, e.data)
  if self.compare_every < 0 then util.fail("dt.job: compare_every is a number of steps, 0 for never; got %d", self.compare_every) end
  e.metrics = metrics.list(e.metrics)
  self.eval = e
  M.made[#M.made + 1] = self
  return self
end

--- A field { name, dtype, shape } of the training set, or nil.
function Job:field(name) return field(self.data.train, name) end

--- Where a rank among `ranks` stands: { ranks, rank, mesh, data = which part of the samples is its, replicas = parts of the samples,
--- copies = ranks that have the same part of the model }.
function Job:where_is(rank, ranks)
  local mesh = util.at(self.where, self.parallel.mesh, self.parallel, ranks)
  local at, copies = strategies.among(mesh, rank, "samples")
  local alone = self.parallel:replicas() == "alone" -- every batch goes to all
  return { ranks = ranks, rank = rank, mesh = mesh, data = alone and 0 or at, replicas = alone and 1 or copies, copies = copies }
end

--- Rows of a full microbatch on so many replicas: batch.micro, at most a replica's part of the global batch.
function Job:rows(replicas)
  local part = math.max(1, -(-math.min(self.batch.global, self.data.train:count()) // replicas))
  return math.min(self.batch.micro or part, part)
end

--- Says how many replicas of a mesh (job:where_is) have no sample in a full step; nil where each has some.
function Job:without_samples(where)
  local n = math.min(self.batch.global, self.data.train:count())
  if where.replicas <= n then return nil end
  return ("batch %d has a sample for %d of %d replicas: the others compute nothing; a batch of %d or more, or fewer ranks, would "
    .. "do"):format(self.batch.global, n, where.replicas, where.replicas)
end

--- Optimizer steps to train, given the steps of an epoch. Options of the command line come first.
function Job:total(steps_per_epoch, options)
  if options.steps then return options.steps end
  if options.epochs then return options.epochs * steps_per_epoch end
  if self.steps then return self.steps end
  if self.epochs then return self.epochs * steps_per_epoch end
  util.fail_at(self.where, "dt.job needs steps or epochs, or --steps on the command line")
end

function Job:__tostring() return "job of " .. (self.where or "?") end

return M
