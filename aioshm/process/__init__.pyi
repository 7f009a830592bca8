from aioshm.process.stopping import adopt_orphans as adopt_orphans
