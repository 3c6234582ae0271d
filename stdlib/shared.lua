-- Engines that hold the same parameters and buffers: alternating losses, a GAN's two players. Each engine lays them out
-- in its executor as its own strategy wants, but there is one value: an engine that is about to read takes what another
-- has changed since. Invariants: parameter.engine is the engine that changed it last, parameter.changed counts the
-- changes that others must see; engine.held lists, in the model's order, which is the same on all ranks, { p, name in
-- the executor, trains, seen = the change it has }. Engines that share nothing pay for nothing.
local modules = require "dtrain.nn.module"
local trace = require "dtrain.trace"
local util = require "dtrain.util"

local M = {}

--- Calls of a new engine, whose executor is ready: it takes part in the parameters of its job, with the values that they have now.
function M.join(engine)
  local job, partners = engine.job, {}
  engine.held, engine.entry, engine.partners = {}, {}, {}
  for _, m in ipairs(trace.modules(job)) do
    modules.base.each_parameter(m[2], function(path, p)
      if engine.entry[p] then return end
      local buffer = p.type == "buffer"
      local e = { p = p, name = (buffer and "buffer:" or "") .. m[1] .. path,
        changes = buffer or p.trainable and not job.frozen[p] }
      if p.engine and not partners[p.engine] then
        partners[p.engine] = true
        engine.partners[#engine.partners + 1] = p.engine
        for _, other in ipairs(p.engine.partners) do
          if other.entry[p] and not partners[other] then
            partners[other] = true
            engine.partners[#engine.partners + 1] = other
          end
        end
      end
      if p.engine then p.changed = p.changed or 0 else p.engine, e.seen = engine, p.changed end
      engine.entry[p], engine.held[#engine.held + 1] = e, e
    end)
  end
  for _, other in ipairs(engine.partners) do other.partners[#other.partners + 1] = engine end
  M.take(engine, "dt.engine")
end

--- Before an engine reads its parameters: what its partners have changed comes into its own memory. All ranks call it together.
function M.take(engine, what)
  if #engine.partners == 0 then return end
  for _, other in ipairs(engine.partners) do
    if other.pieces then
      util.fail("%s: another engine of the same model is between the forward and the update of step %d; end its step first",
        what, other.step_number + 1)
    end
  end
  for _, e in ipairs(engine.held) do
    local from = e.p.engine
    if from ~= engine and e.seen ~= e.p.changed then
      engine.exec:take(e.name, from.exec, from.entry[e.p].name)
      e.seen = e.p.changed
    end
  end
end

--- After an engine has changed what it trains, or all (a checkpoint was loaded).
function M.changed(engine, all)
  engine.version = engine.version + 1
  if #engine.partners == 0 then return end
  for _, e in ipairs(engine.held) do
    if all or e.changes then
      local p = e.p
      p.engine, p.changed = engine, (p.changed or 0) + 1
      e.seen = p.changed
    end
  end
end

--- The concrete value of a parameter, read again after a change (nn/parameter.lua calls this).
function M.fetch(engine, p)
  if p.from ~= engine or p.version ~= engine.version then
    p.data, p.from, p.version = engine.exec:get(engine.entry[p].name), engine, engine.version
  end
  return p.data
end

--- Gives it a value, which partners see.
function M.store(engine, p, tensor)
  local e = engine.entry[p]
  engine.exec:set(e.name, tensor)
  p.data, p.from, p.version = tensor, engine, engine.version
  p.changed = (p.changed or 0) + 1
  e.seen = p.changed
end

return M
