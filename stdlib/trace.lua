-- From a job to plans: runs the model's forward once on symbolic tensors for each size of microbatch, then the
-- passes. Ranks and sizes are arguments, so that one process plans for any number of ranks.
local core = require "dtrain.core"
local M = require "dtrain.nn.module"
local scope = require "dtrain.nn.scope"
local strategies = require "dtrain.strategy"
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

local function compile(job, graph, how, train)
  local o = { train = train, precision = job.precision, rows = how.rows, rank = how.where.rank, threads = how.threads,
    clip = job.clip.norm, clip_value = job.clip.value, layout = how.layout, ranks = how.where.ranks,
    optimizer = job.optimizer.def.name }
  job.parallel:compile(o, how.where.mesh, graph, how)
  return graph:compile(o)
end

local function within(job, how, training, f)
  local graph = core.graph { rows = how.rows, mesh = how.where.mesh }
  local s = { graph = graph, rows = how.rows, symbols = {}, training = training, once = true, job = job,
    label = "the job's model" }
  return util.at(job.where, scope.with, s, function()
    local optimizer = job.optimizer
    for _, m in ipairs(trace.modules(job)) do
      trace.declare(graph, m[2], s.symbols, m[1], function(name) return optimizer:group_of(name) end, job.frozen)
    end
    if M.is(job.model) then s.blocks, s.lists = M.base.blocks(job.model) end
    return f(graph)
  end)
end

-- What is traced depends on the rank only by its coordinates on axes that divide layers: ranks that differ in others compile
-- copies of one graph. how.known is a table that keeps such graphs, or nil.
local function shared(how, what, f)
  local key = table.concat({ what, how.rows, (strategies.among(how.where.mesh, how.where.rank)) }, " ")
  if not how.known[key] then how.known[key] = table.pack(f()) end
  local k = how.known[key]
  return k[1]:clone(), table.unpack(k, 2, k.n)
end

local function update(job, how)
  return within(job, how, true, function(graph)
    local _, _, loss, count = forward(job, graph, how.rows)
    graph:loss(loss, count)
    for _, s in ipairs(job.parallel:with "between") do
      if s.between.declare then s.between.declare(graph, job.parallel.p) end
    end
    job.parallel:localize(graph, how.where)
    graph:grad()
    updates.trace(job, graph, graph:update { clip = job.clip.norm, clip_value = job.clip.value })
    return graph, count ~= nil
  end)
end

local function train(job, how)
  local graph, counts
  if how.known and not job.parallel:tries() then
    graph, counts = shared(how, "train", function() return update(job, how) end)
  else
    graph, counts = update(job, how)
  end
  return util.at(job.where, compile, job, graph, how, true), counts
end

--- The training plan for microbatches of how.rows samples; how = { rows, where = job:where_is(...), threads, layout = plan or nil,
--- known = a table that keeps graphs for other ranks' plans, or nil }.
--- Returns the plan and whether the loss counts its own labels. A strategy with a limit to meet traces several times.
function trace.train(job, how)
  return util.at(job.where, job.parallel.fit, job.parallel, how, function() return train(job, how) end)
end

--- The plan that a strategy runs between steps (its `between`). how.layout is the training plan.
function trace.between(job, strategy, how)
  local axes = {}
  for _, a in ipairs(how.where.mesh) do if a.splits == "samples" then axes[#axes + 1] = a.name end end
  return within(job, how, false, function(graph)
    job.parallel:localize(graph, how.where)
    graph:between()
    strategy.between.trace(graph, job.parallel.p, axes)
    return compile(job, graph, how, false)
  end)
end

--- The evaluation plan of the job's metrics. Returns the plan and, for each metric, where its numbers are: { sum =
--- output number, count = output number or nil, per_sample = number }.
function trace.eval(job, how)
  return within(job, how, false, function(graph)
    local output, targets, loss, count = forward(job, graph, how.rows)
    local places, n = {}, 0
    for i, metric in ipairs(job.eval.metrics) do
      local sum, weight = metric.trace(output, targets, loss, count or how.rows)
      scalar(job, "metric " .. metric.name, sum)
      n = n + 1
      graph:output(sum, metric.name)
      places[i] = { sum = n }
      if type(weight) == "number" then
        places[i].per_sample = weight / how.rows
      else
        scalar(job, "the count of metric " .. metric.name, weight)
        n = n + 1
        graph:output(weight, metric.name .. ".count")
        places[i].count = n
      end
    end
    job.parallel:localize(graph, how.where)
    return compile(job, graph, how, false), places
  end)
end

return trace
