-- The library's training loop: steps, evaluations, checkpoints, the progress line, and a checkpoint at Ctrl-C.
local core = require "dtrain.core"
local engines = require "dtrain.engine"
local memory = require "dtrain.memory"
local modules = require "dtrain.nn.module"
local progress = require "dtrain.progress"
local trace = require "dtrain.trace"
local util = require "dtrain.util"

local function introduce(engine, show)
  local job, parameters = engine.job, 0
  for _, m in ipairs(trace.modules(job)) do parameters = parameters + modules.base.count(m[2]) end
  local ranks, threads = core.size(), core.threads()
  local replicas = job:where_is(core.rank(), ranks).replicas
  local micro = job:rows(replicas)
  local on = job.runs_on == "cpu" and "" or " on " .. job.runs_on
  show:say("%s parameters, %d rank%s x %d thread%s, batch %d%s, %d steps%s", util.commas(parameters), ranks,
    ranks == 1 and "" or "s",
    threads, (threads == 1 and "" or "s") .. on, job.batch.global, micro * replicas < job.batch.global
      and (" (micro %d)"):format(micro) or "",
    engine.steps, engine.start > 0 and (", from step %d"):format(engine.start) or "")
  for _, name in ipairs(engine.plan:unused()) do
    show:say("note: no gradient reaches %s; it stays as it is", name)
  end
  if engine.options.verbose then
    if core.rank() == 0 then print(job.model) end
    show:say("%s", memory.table({ { "rank " .. core.rank(), engine.exec:memory() } }))
  end
end

-- A step. Where a data file fails, the state of the step before it is whole: it is saved, except among ranks, of which the others wait
-- in the step.
local function step_of(engine)
  if not engine.checkpoint or core.size() > 1 then return engine:step() end
  local ok, m = xpcall(engine.step, function(e) return os.getenv "DT_TRACEBACK" and debug.traceback(e) or e end, engine)
  if ok then return m end
  if core.file_failed() and engine.step_number > engine.start and engine.saved ~= engine.step_number then
    engine:save()
    m = ("%s (step %d is saved below %s; --resume auto goes on from it)"):format(m, engine.step_number, engine.checkpoint.dir)
  end
  error(m, 0)
end

--- Trains a job to its end (or until Ctrl-C); returns the engine.
return function(job)
  local engine = engines.new(job)
  engine.driven = true -- the progress line below reports the steps
  local show = progress.new(engine)
  introduce(engine, show)
  local evaluate, checkpoint = job.eval, job.checkpoint
  local every = checkpoint and checkpoint.every
  engine.history, engine.evaluations = {}, {}
  local function eval()
    local values = engine:eval()
    engine.evaluations[#engine.evaluations + 1] = { engine.step_number, values }
    show:eval(values, evaluate.metrics)
    return engine.step_number
  end
  local evaluated
  for step in engine:batches() do
    local m = step_of(engine)
    engine.history[step] = m.loss
    show:step(m)
    if evaluate.every and step % evaluate.every == 0 then evaluated = eval() end
    if every and step % every == 0 then engine:save() end
  end
  local stopped = engine.step_number < engine.steps
  if not stopped and evaluate.data and evaluated ~= engine.step_number
    and engine.step_number > engine.start then eval() end
  if engine.checkpoint and engine.saved ~= engine.step_number then engine:save() end
  if stopped then
    show:say(engine.saved and "stopped after step %d; saved below %s, --resume auto continues"
      or "stopped after step %d; nothing saved (checkpoint = { dir = ... } or --out would)", engine.step_number,
      engine.checkpoint and engine.checkpoint.dir)
  end
  show:close()
  core.trained()
  if job.after and not stopped then job.after(engine) end
  return engine
end
