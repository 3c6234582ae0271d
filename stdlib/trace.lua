-- From a job to plans: runs the model's forward once on symbolic tensors for each size of microbatch, then the
-- passes. Ranks and sizes are arguments, so that one process plans for any number of ranks.
local core = require "dtrain.core"
local M = require "dtrain.nn.module"
local scope = require "dtrain.nn.scope"
local updates = require "dtrain.optim.update"
local util = require "dtrain.util"

local trace = {}

--- Declares every parameter and buffer of a module in the graph; symbols[parameter] = symbol. group(name) ->
--- optimizer group. frozen: set of parameters that get no gradient whatever their own flag says, or nil.
function trace.declare(graph, module, symbols, prefix, group, frozen)
  M.base.each_parameter(module, function(name, p)
    name = prefix .. name
    if symbols[p] then return end
    if p.type == "buffer" then
      symbols[p] = graph:buffer(name, p.shape, { init = p:initial(name) })
    else
      symbols[p] = graph:param(name, p.shape, { init = p:initial(name),
        trainable = p.trainable and not (frozen and frozen[p]), group = group and group(name) or 0 })
      if p.place then graph:place(name, p.place) end
    end
  end)
end

--- The job's modules that hold parameters: { prefix, module } in order.
function trace.modules(job)
  local out = {}
  if M.is(job.model) then out[#out + 1] = { "", job.model } end
  if M.is(job.loss) then out[#out + 1] = { "loss.", job.loss } end
  return out
end

local function scalar(job, what, x)
  if not core.is_symbolic(x) then
    util.fail_at(job.where, "%s must be a tensor, got %s; return what the operations give", what, util.show(x))
  end
  if x:numel() ~= 1 then
    util.fail_at(job.where, "%s must be a scalar, got shape %s; take its mean", what, util.show(x:shape()))
  end
  return x
end

-- Inputs, model and loss; returns output, targets, loss, count (nil: samples).
local function forward(job, graph, rows)
  local symbols = {}
  for _, f in ipairs(job.data.train:fields()) do
    symbols[f.name] = graph:input(f.name, f.dtype, { rows, table.unpack(f.shape) })
  end
  local output = job.model(symbols.inputs)
  if output == nil then util.fail_at(job.where, "the model's forward returned nothing; it must return its output") end
  local loss, count = job.loss(output, symbols.targets, symbols.inputs)
  scalar(job, "the loss", loss)
  if count ~= nil then scalar(job, "the loss's count", count) end
  return output, symbols.targets, loss, count
end

-- The mesh in a word.
local function name_of(mesh)
  return table.concat(util.map(mesh, function(a) return ("%s=%d %s"):format(a.name, a.size, a.splits or "") end), ", ")
end

-- What is traced for microbatches of how.rows samples: { graph =, and what f(graph, entry) writes into it }. Strategies and ranks
-- have no part in it, so that it is traced once and compiled for each; where the model names axes, once for each mesh.
local function traced(job, how, kind, training, f)
  local key, mesh = kind .. " " .. how.rows, name_of(how.where.mesh)
  local t = how.traced[key]
  if t and (t.mesh == mesh or not t.graph:meshed()) then return t end
  t = { graph = core.graph { rows = how.rows, mesh = how.where.mesh, precision = job.precision }, mesh = mesh }
  local s = { graph = t.graph, rows = how.rows, symbols = {}, training = training, once = true, job = job,
    label = "the job's model" }
  util.at(job.where, scope.with, s, function()
    for _, m in ipairs(trace.modules(job)) do
      trace.declare(t.graph, m[2], s.symbols, m[1], function(name) return job.optimizer:group_of(name) end, job.frozen)
    end
    if M.is(job.model) then s.blocks, s.lists = M.base.blocks(job.model) end
    f(t.graph, t)
  end)
  how.traced[key] = t
  return t
end

-- The plan of what was traced, for the rank and the strategies that `how` names. between: the strategy whose verb runs between
-- steps, or nil.
local function compile(job, how, graph, train, between)
  local parallel, where = how.parallel or job.parallel, how.where
  local o = { train = train, precision = job.precision, rows = how.rows, mesh = where.mesh, rank = where.rank, ranks = where.ranks,
    threads = how.threads, layout = how.layout, clip = job.clip.norm, clip_value = job.clip.value, optimizer = job.optimizer.def.name }
  local function verb(f)
    return function(g, ...)
      local s = { graph = g, rows = how.rows, symbols = {}, training = train, once = true, job = job,
        label = "a strategy's verb" }
      return scope.with(s, f, g, ...)
    end
  end
  o.place = verb(function(g) parallel:place(g, where.mesh, train) end)
  if between then
    local axes = {}
    for _, a in ipairs(where.mesh) do if a.splits == "samples" then axes[#axes + 1] = a.name end end
    o.placed = verb(function(g)
      g:between()
      between.between.trace(g, parallel.p, axes)
    end)
  end
  if train then o.update = verb(function(g, entries) updates.trace(job, parallel, g, entries) end) end
  return util.at(job.where, function()
    parallel:compile(o, graph, how)
    return graph:compile(o)
  end)
end

--- The training plan for microbatches of how.rows samples; how = { rows, where = job:where_is(...), threads, micros = numbers of
--- microbatches of a step, layout = plan or nil, traced = a table that keeps what was traced for other ranks and strategies,
--- parallel = other strategies than the job's (strategy.new), or nil }. Returns the plan and whether the loss counts its own
--- labels. A strategy with a limit to meet compiles several times.
function trace.train(job, how)
  local t = traced(job, how, "train", true, function(graph, t)
    local _, _, loss, count = forward(job, graph, how.rows)
    graph:loss(loss, count)
    t.counts = count ~= nil
  end)
  local parallel = how.parallel or job.parallel
  local plan = util.at(job.where, parallel.fit, parallel, how, function() return compile(job, how, t.graph, true) end)
  return plan, t.counts
end

--- The plan that a strategy runs between steps (its `between`). how.layout is the training plan.
function trace.between(job, strategy, how)
  return compile(job, how, traced(job, how, "between", false, function() end).graph, false, strategy)
end

--- The evaluation plan of the job's metrics. Returns the plan and, for each metric, where its numbers are: { sum =
--- output number, count = output number or nil, per_sample = number }.
function trace.eval(job, how)
  local t = traced(job, how, "eval", false, function(graph, t)
    local output, targets, loss, count = forward(job, graph, how.rows)
    local n = 0
    t.places = {}
    for i, metric in ipairs(job.eval.metrics) do
      local sum, weight = metric.trace(output, targets, loss, count or how.rows)
      scalar(job, "metric " .. metric.name, sum)
      n = n + 1
      graph:output(sum, metric.name)
      t.places[i] = { sum = n }
      if type(weight) == "number" then
        t.places[i].per_sample = weight / how.rows
      else
        scalar(job, "the count of metric " .. metric.name, weight)
        n = n + 1
        graph:output(weight, metric.name .. ".count")
        t.places[i].count = n
      end
    end
  end)
  return compile(job, how, t.graph, false), t.places
end

return trace
