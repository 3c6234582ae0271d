-- A step in pieces, as an engine's methods: for each microbatch of this rank forward, backward and step, called by the script.
-- Invariant: together they run the plan of a whole step, in its order, and so have its bits. engine.pieces is the microbatch
-- under way, `wants` the call that is due.
local shared = require "dtrain.shared"
local strategies = require "dtrain.strategy"
local util = require "dtrain.util"

local Pieces, M = {}, {}

--- What a loop gets for the engine's next step.
function M.batch(engine)
  local done, per = engine.step_number, engine.steps_per_epoch
  return { step = done + 1, epoch = done // per, index = done % per }
end

--- Iterates over (step, microbatch) of this rank: { step, epoch, index, micro = from 1, micros = how many }. The loop calls
--- `loss = engine(batch)`, `engine:backward(loss)` and `engine:step()` for each; the last of a step updates.
function Pieces:microbatches()
  if select(2, strategies.among(self.where.mesh, 0, "stages")) > 1 then
    util.fail("engine:microbatches: with pipeline stages forward and backward of several microbatches interleave; "
      .. "use engine:batches() and engine:step(batch), which do the whole")
  end
  return function()
    local p = self.pieces
    if p and p.wants ~= "step taken" then
      util.fail("engine:microbatches: microbatch %d of step %d still wants %s; forward, backward and step belong to each",
        p.micro, p.step, p.wants)
    end
    if not p then
      if self:over() then return nil end
      p = M.batch(self)
      shared.take(self, "engine:microbatches")
      self:schedule()
      p.micro, p.micros = 0, self.exec:begin(self.loader)
      self.pieces = p
    end
    p.micro, p.wants = p.micro + 1, "forward"
    return p.step, p
  end
end

local function piece(self, name, wants)
  local p = self.pieces
  if not p or p.wants ~= wants then
    util.fail("engine:%s: %s; for each batch of engine:microbatches() call engine(batch), engine:backward(loss), "
      .. "engine:step(), in this order", name, p and ("microbatch %d of step %d wants %s"):format(p.micro, p.step, p.wants)
      or "no microbatch is under way")
  end
  return p
end

--- Forward of the microbatch at hand; returns its mean loss on this rank, a number. engine(batch) is the same.
function Pieces:forward(batch)
  local p = piece(self, "forward", "forward")
  if batch ~= p then util.fail("engine:forward wants the batch that engine:microbatches() gave last") end
  p.loss, p.count = self.exec:forward(self.loader)
  p.wants = "backward"
  return p.loss
end

--- Backward of that microbatch, whose loss it is: the gradients are added to those of the step's earlier ones.
function Pieces:backward(loss)
  local p = piece(self, "backward", "backward")
  if loss ~= p.loss and (loss == loss or p.loss == p.loss) then
    util.fail("engine:backward wants the loss of the last forward, %.9g, got %s; factors and terms belong into the job's "
      .. "loss, which is traced", p.loss, util.show(loss))
  end
  self.exec:backward()
  p.wants = "step"
end

--- engine:step() in a loop over microbatches: updates after the last one and returns the step's numbers, else
--- nil. stepped(engine, info): what the engine does after a step.
function M.finish(self, stepped)
  local p = piece(self, "step", "step")
  p.wants = "step taken"
  if p.micro < p.micros then return nil end
  self.pieces = nil
  return stepped(self, self.exec:finish(self.loader, self.info))
end

--- Adds the methods to the class of engines; engine(batch) is its forward.
function M.install(Engine)
  for name, f in util.sorted(Pieces) do Engine[name] = f end
  Engine.__call = Pieces.forward
end

return M
